"""One process of the job with all of its children, seen from outside: by its files, and by what the kernel says."""

import os
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import assert_never

import msgspec
import psutil

from soak.plan import Moment, Victim
from staleflow.checkpoints import FOLDER, PARTIAL, newest_step, open_checkpoint
from staleflow.events import Evaluated

MARK = "STALEFLOW_SOAK"
"""An environment variable; children inherit it, so that none of them can be overlooked."""
TRAINER_MODULE = "staleflow.trainer."
EVALUATED = b'{"event":"evaluated"'
POLL_S = 0.01
TERM_GRACE_S = 60.0
LOG_TAIL_LINES = 15


class Job:
    """A process of the job; starts at once.

    Args:
        command: what to start; knows itself that it is to go on with ``run_dir``, where there is a checkpoint.
        run_dir: the run folder.
        log_path: where to put what it says.
        evaluate_every_steps: how often it evaluates.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, log_path: Path, *, evaluate_every_steps: int) -> None:
        self.resumed_from = newest_step(run_dir)
        self._metrics = run_dir / "metrics.jsonl"
        self._events = run_dir / "events.jsonl"
        self._checkpoints = run_dir / FOLDER
        self._log_path = log_path
        self._every = evaluate_every_steps
        self._begins_bytes = 0 if self.resumed_from is None else open_checkpoint(run_dir).cut.history.metrics_bytes
        self._took_over = False
        self._seen = (self._begins_bytes, 0)
        self._mark = uuid.uuid4().hex
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for whoever started it, who then ends it in order.
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """Of the controller; None while it lives."""
        return self._process.poll()

    @property
    def first_step(self) -> int:
        """The first step that this process trains."""
        return self.resumed_from or 0

    @property
    def trained(self) -> int:
        """How many steps this process has trained so far."""
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        # What the process before has written after its checkpoint is there until this one takes over the folder.
        self._took_over = self._took_over or size == self._begins_bytes
        if self._took_over and size != self._seen[0]:
            with self._metrics.open("rb") as metrics:
                metrics.seek(self._begins_bytes)
                self._seen = (size, metrics.read().count(b"\n"))
        return self._seen[1]

    @property
    def steps(self) -> int:
        """How many steps of the whole history have been trained."""
        return self.first_step + self.trained

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.trained > 0 and any(self._checkpoints.glob(f"*{PARTIAL}"))

    @property
    def has_trainer(self) -> bool:
        """Whether a process of the trainer has been started."""
        return any(_is_trainer(process) for process in self.processes())

    def processes(self) -> list[psutil.Process]:
        """The controller and all that it has started, or that these have, while they live."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def strike(self, victim: Victim) -> Moment:
        """Kill; returns what the job was doing."""
        controller = psutil.Process(self._process.pid)
        # It stands still while its children are looked for, so that it starts none and notices no death.
        controller.suspend()
        moment, family = self._moment(), self.processes()
        match victim:
            case Victim.CONTROLLER:
                controller.kill()
            case Victim.TRAINER:
                for process in filter(_is_trainer, family):
                    process.kill()
                controller.resume()
            case Victim.EVERYTHING:
                for process in family:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            case _:
                assert_never(victim)
        return moment

    def gone_within(self, limit_s: float) -> bool:
        """Wait until the controller and everything that it has started are gone; False if some are still there."""
        until = time.monotonic() + limit_s
        while self.exit_code is None or self.processes():
            if time.monotonic() > until:
                return False
            time.sleep(10 * POLL_S)
        return True

    def end(self) -> None:
        """Leave nothing of it: politely if the controller listens."""
        if self.exit_code is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(TERM_GRACE_S)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def said(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _moment(self) -> Moment:
        if self.trained == 0:
            return Moment.START_UP
        if self.saving:
            return Moment.SAVING
        # The log is that of the last step, so an evaluation that has ended since still counts.
        due = self.steps // self._every * self._every
        if 0 < due >= self.first_step and due not in self._evaluated():
            return Moment.EVALUATION
        return Moment.TRAINING

    def _evaluated(self) -> set[int]:
        with self._events.open("rb") as events:
            lines = [line for line in events if line.startswith(EVALUATED) and line.endswith(b"\n")]
        return {msgspec.json.decode(line, type=Evaluated).step for line in lines}


def _is_trainer(process: psutil.Process) -> bool:
    try:
        return any(word.startswith(TRAINER_MODULE) for word in process.cmdline())
    except psutil.Error:
        return False
