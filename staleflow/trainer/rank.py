"""One rank of a trainer: a wire around ``learner``.

Started by :class:`staleflow.trainer.local.LocalTrainer` as ``python -m staleflow.trainer.rank FD RANK PORT [FD]``, or
by torchrun as ``-m staleflow.trainer.rank HOST:PORT``, where a :class:`staleflow.trainer.remote.RemoteTrainer` listens.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias, assert_never

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from staleflow.errors import TrainerError
from staleflow.process import Parent
from staleflow.trainer.handshake import connect
from staleflow.trainer.learner import Learner
from staleflow.trainer.local import TrainerSettings
from staleflow.trainer.protocol import Answer, Call, Failed, LoadState, Publish, Save, SaveState, Step
from staleflow.trainer.world import World, meet, meet_as_launched

ToRank: TypeAlias = TrainerSettings | Call


def _carry_out(learner: Learner, message: Call) -> Answer:
    try:
        match message:
            case Step(call, batch):
                return Answer(call, metrics=learner.step(batch))
            case Publish(call, weights):
                learner.write_weights(Path(weights))
            case Save(call, folder):
                learner.save(Path(folder))
            case SaveState(call, folder):
                learner.save_state(Path(folder))
            case LoadState(call, folder):
                learner.load_state(Path(folder))
            case _:
                assert_never(message)
    except (TrainerError, OSError, SafetensorError) as error:
        return Answer(message.call, error=str(error))
    return Answer(message.call)


def _serve(parent: Parent[ToRank], meeting: Callable[[TrainerSettings], World]) -> None:
    requests = iter(parent)
    settings = next(requests)
    if not isinstance(settings, TrainerSettings):
        raise TypeError(f"the first message must be TrainerSettings, not {type(settings).__name__}")
    torch.set_num_threads(settings.threads)
    learner = Learner(settings, meeting(settings))
    parent.send(Answer(0, limits=learner.limits, note=learner.note))
    for message in requests:
        if isinstance(message, TrainerSettings):
            raise TypeError("TrainerSettings came twice")
        parent.send(_carry_out(learner, message))


def session(parent: Parent[ToRank], meeting: Callable[[TrainerSettings], World]) -> None:
    """Serve the controller until it hangs up; an exception is the rank's last word to it."""
    # The log is for its last lines, and those are for errors.
    logging.disable_progress_bar()
    try:
        _serve(parent, meeting)
    except BaseException:
        # Before the process and its connections end: the others fail in consequence, and later.
        parent.send(Failed(time.time_ns(), traceback.format_exc()))
        raise


def _on_this_machine(settings: TrainerSettings) -> World:
    rank, port, *listening = map(int, sys.argv[2:])
    return meet(rank, settings.ranks, port, next(iter(listening), None), settings.collective_timeout_s)


def _as_launched(settings: TrainerSettings) -> World:
    return meet_as_launched(settings.collective_timeout_s)


def _main() -> NoReturn:
    if len(sys.argv) > 2:
        Parent.serve(ToRank, partial(session, meeting=_on_this_machine))  # type: ignore[arg-type]
    if len(sys.argv) != 2 or "RANK" not in os.environ:
        sys.exit("usage: torchrun ... -m staleflow.trainer.rank HOST:PORT, the address where a RemoteTrainer listens")
    connection = connect(sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    Parent.serve(ToRank, partial(session, meeting=_as_launched), connection)  # type: ignore[arg-type]


if __name__ == "__main__":
    _main()
