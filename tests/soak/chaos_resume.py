"""Kill the arithmetic job again and again, wherever it is, and resume it: it must end as if nothing had happened.

``make chaos-resume``. The job is ``examples/arithmetic.py`` in processes of its own. At moments that chance has chosen
beforehand (:mod:`soak.plan`) its controller, its trainer or all of its processes are killed with SIGKILL; what is left
is resumed, until the job has come to its end. Then the history that they all have written is judged
(:mod:`soak.history`), and that nothing of them is left on the machine.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec
from arithmetic import EVALUATE_EVERY_STEPS
from rich.console import Console
from rich.table import Table

from soak.history import Promise, judge
from soak.job import POLL_S, Job
from soak.plan import Kill, Moment, Victim, plan
from soak.shared_memory import contents, left_behind
from staleflow.checkpoints import newest_step

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STALL_S = 300.0
"""Without a step, from start-up to the end; a busy machine needs a minute to start."""
END_S = 60.0
"""From a blow to the end of every process; a child that still imports torch notices only after that."""
SAY_EVERY_S = 30.0
WIDTH = 130
"""Of the tables, where there is no terminal."""
JOB_SEED = 1


class ChaosError(Exception):
    """The job did what nobody had asked it to; says what, and what it said last."""


class Struck(msgspec.Struct, kw_only=True):
    """A kill, and what became of it. Seconds count from the blow.

    ``moment`` and ``step`` are what it met. ``resumed_from`` is None where nothing had been saved, so that the job
    began anew; ``again_s`` is None if the job was killed again before it had trained a step.
    """

    planned: Kill
    at_s: float
    moment: Moment
    step: int
    exit_code: int | None
    gone_s: float
    resumed_from: int | None = None
    again_s: float | None = None


class Chaos:
    """One job, killed and resumed.

    Args:
        folder: where its run folders and its output go.
        steps: of the job.
        save_every: steps from checkpoint to checkpoint.
        console: where to say how it goes.
    """

    def __init__(self, folder: Path, *, steps: int, save_every: int, console: Console) -> None:
        self.struck: list[Struck] = []
        self.lives = 0
        self.run_dir = folder / "run-1"
        self._folder = folder
        self._steps = steps
        self._save_every = save_every
        self._console = console
        self._began_s = time.monotonic()
        self._progress_s = self._said_s = 0.0
        self._trained = 0

    def run(self, kills: Sequence[Kill]) -> None:
        """Kill the job so many times, and see it to its end; raises :class:`ChaosError` if it does not get there.

        No process of it is left then, nor after Ctrl-C.
        """
        job = self._start()
        try:
            for kill in kills:
                self._wait_until_due(job, kill)
                self._strike(job, kill)
                job = self._start()
                self.struck[-1].resumed_from = job.resumed_from
            while job.exit_code is None:
                self._watch(job, may_end=True)
            if not job.gone_within(END_S):
                raise ChaosError(f"left {END_S:.0f} s after the end of the job: {job.processes()}")
        finally:
            job.end()
        if job.steps < self._steps:
            raise ChaosError(f"the job ended at step {job.steps} with code {job.exit_code}:\n{job.said()}")
        self._say(f"the job has ended after step {job.steps}, with code {job.exit_code}")

    def _start(self) -> Job:
        self.lives += 1
        resumes = newest_step(self.run_dir) is not None
        if not resumes:
            self.run_dir = self._folder / f"run-{self.lives}"
        command = [sys.executable, str(EXAMPLES / "arithmetic.py"), "--seed", str(JOB_SEED)]
        command += ["--steps", str(self._steps), "--checkpoint-every-steps", str(self._save_every)]
        command += ["--resume" if resumes else "--run-dir", str(self.run_dir)]
        job = Job(command, self.run_dir, self._folder / f"{self.lives}.log", evaluate_every_steps=EVALUATE_EVERY_STEPS)
        self._progress_s = time.monotonic()
        self._trained = 0
        self._say("begins" if job.resumed_from is None else f"resumes from step {job.resumed_from}")
        return job

    def _wait_until_due(self, job: Job, kill: Kill) -> None:
        while not self._due(job, kill):
            self._watch(job)
        # Once more, so that the step that made it due is seen.
        self._watch(job)
        until = time.monotonic() + kill.delay_s
        while time.monotonic() < until and not (kill.moment is Moment.START_UP and job.trained > 0):
            self._watch(job)
        while kill.victim is Victim.TRAINER and not job.has_trainer:
            self._watch(job)

    def _due(self, job: Job, kill: Kill) -> bool:
        if kill.moment is Moment.START_UP:
            return True
        if job.trained == 0 or job.steps < kill.step:
            return False
        if kill.moment is Moment.SAVING:
            return job.saving
        if kill.moment is Moment.EVALUATION:
            # That of the planned step is over if the job was resumed behind it.
            evaluation = -(-max(kill.step, job.first_step) // EVALUATE_EVERY_STEPS) * EVALUATE_EVERY_STEPS
            return job.steps >= min(evaluation, self._steps - 1)
        return True

    def _watch(self, job: Job, *, may_end: bool = False) -> None:
        """Wait a moment, and see that the job is still at work."""
        time.sleep(POLL_S)
        now_s = time.monotonic()
        if job.trained > self._trained:
            if self._trained == 0 and self.struck:
                self.struck[-1].again_s = now_s - self.struck[-1].at_s - self._began_s
                self._say(f"trains again {self.struck[-1].again_s:.1f} s after the blow")
            self._progress_s, self._trained = now_s, job.trained
        if now_s - self._said_s > SAY_EVERY_S:
            self._say(f"step {job.steps} of {self._steps}")
        if job.exit_code is not None and not may_end:
            raise ChaosError(f"the job ended by itself at step {job.steps}, code {job.exit_code}:\n{job.said()}")
        if now_s - self._progress_s > STALL_S:
            raise ChaosError(f"no step within {STALL_S:.0f} s, at step {job.steps}; the job said last:\n{job.said()}")

    def _strike(self, job: Job, kill: Kill) -> None:
        struck_s = time.monotonic()
        moment, step = job.strike(kill.victim), job.steps
        gone = job.gone_within(END_S)
        struck = Struck(
            planned=kill,
            at_s=struck_s - self._began_s,
            moment=moment,
            step=step,
            exit_code=job.exit_code,
            gone_s=time.monotonic() - struck_s,
        )
        self.struck.append(struck)
        self._say(f"kill {len(self.struck)}: {kill.victim}, {moment} at step {step}, gone after {struck.gone_s:.1f} s")
        if not gone:
            raise ChaosError(
                f"processes are left {END_S:.0f} s after the blow: {job.processes()}; it said:\n{job.said()}"
            )
        wanted = 1 if kill.victim is Victim.TRAINER else -signal.SIGKILL
        if job.exit_code != wanted:
            raise ChaosError(f"the controller ended with code {job.exit_code}, not {wanted}:\n{job.said()}")

    def _say(self, what: str) -> None:
        self._said_s = time.monotonic()
        self._console.print(
            f"{time.monotonic() - self._began_s:6.1f} s  process {self.lives}: {what}", highlight=False, soft_wrap=True
        )


def main() -> int:
    """Do what the command line asks for; returns the exit code."""
    options = _options()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    options.out.mkdir(parents=True)
    kills = plan(options.kills, steps=options.steps, evaluate_every_steps=EVALUATE_EVERY_STEPS, seed=options.seed)
    console.print(f"{len(kills)} kills, {options.steps} steps; in {options.out}", highlight=False, soft_wrap=True)
    _warm_start()
    memory_before, began_s = contents(), time.monotonic()
    chaos = Chaos(options.out, steps=options.steps, save_every=options.checkpoint_every_steps, console=console)
    promises = []
    try:
        chaos.run(kills)
    except ChaosError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        promises.append(Promise("the job comes to its end", str(error).splitlines()[0], kept=False))
    else:
        promises += judge(chaos.run_dir, steps=options.steps, accuracy=options.accuracy)
    promises += [_every_moment(chaos.struck, kills), _all_gone(chaos.struck), _memory_clean(memory_before)]
    _show(chaos.struck, promises, time.monotonic() - began_s, console)
    record = {"kills": chaos.struck, "promises": promises, "wall_s": time.monotonic() - began_s}
    (options.out / "chaos.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
    return 0 if all(promise.kept for promise in promises) else 1


def _warm_start() -> None:
    """Have the model ready, so that no start-up that is killed has to train it first."""
    code = (
        f"from pathlib import Path; import warm_start; warm_start.warm_started_model(Path('.cache'), seed={JOB_SEED})"
    )
    path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=True)


def _every_moment(struck: Sequence[Struck], kills: Sequence[Kill]) -> Promise:
    met = Counter(kill.moment for kill in struck)
    missed = {kill.moment for kill in kills} - met.keys()
    found = ", ".join(f"{met[moment]} in {moment}" for moment in Moment)
    return Promise(f"{len(kills)} kills, some in every moment planned", found, len(struck) == len(kills) and not missed)


def _all_gone(struck: Sequence[Struck]) -> Promise:
    longest_s = max((kill.gone_s for kill in struck), default=0.0)
    what = f"no process left {END_S:.0f} s after a blow"
    return Promise(what, f"the last gone after {longest_s:.1f} s", longest_s <= END_S)


def _memory_clean(before: set[str]) -> Promise:
    left = left_behind(before)
    return Promise("nothing left in shared memory", ", ".join(left) or "nothing", not left)


def _show(struck: Sequence[Struck], promises: Sequence[Promise], wall_s: float, console: Console) -> None:
    table = Table(
        "kill", "at, s", "victim", "moment", "at step", "gone after, s", "resumed from", "trains again after, s"
    )
    for number, kill in enumerate(struck, start=1):
        table.add_row(
            str(number),
            f"{kill.at_s:.0f}",
            kill.planned.victim,
            kill.moment,
            str(kill.step),
            f"{kill.gone_s:.1f}",
            "the start" if kill.resumed_from is None else str(kill.resumed_from),
            "–" if kill.again_s is None else f"{kill.again_s:.1f}",
        )
    console.print(table)
    passed = all(promise.kept for promise in promises)
    verdict = Table(title=f"{'passed' if passed else 'not passed'}, {wall_s:.0f} s", show_header=False)
    for promise in promises:
        verdict.add_row(promise.what, promise.found, "kept" if promise.kept else "[red]BROKEN[/red]")
    console.print(verdict)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kill the arithmetic job at random moments, resume it, and judge its history.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=20, help="how often it is killed")
    parser.add_argument("--steps", type=int, default=900, help="train steps of the job")
    parser.add_argument("--checkpoint-every-steps", type=int, default=20, help="steps from checkpoint to checkpoint")
    parser.add_argument("--accuracy", type=float, default=0.9, help="held-out accuracy that must be reached")
    parser.add_argument("--seed", type=int, default=1, help="of victims and moments")
    parser.add_argument(
        "--out", type=Path, default=Path("runs") / f"chaos-{datetime.now():%Y-%m-%d-%H%M%S}", help="where to put it all"
    )
    options = parser.parse_args()
    for name in ("kills", "steps", "checkpoint_every_steps"):
        if getattr(options, name) < 1:
            parser.error(f"{name} must be at least 1")
    if options.out.exists():
        parser.error(f"{options.out} exists; choose another folder with --out")
    return options


if __name__ == "__main__":
    os.chdir(ROOT)
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
