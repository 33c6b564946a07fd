"""The local trainer, child side: ``python -m staleflow.trainer.local_server FD``. A wire around ``learner``."""

from pathlib import Path
from typing import assert_never

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from staleflow.errors import TrainerError
from staleflow.process import Parent
from staleflow.trainer.learner import Learner
from staleflow.trainer.local import Answer, LoadState, Publish, Save, SaveState, Step, ToChild, TrainerSettings


def _carry_out(learner: Learner, message: Step | Publish | Save | SaveState | LoadState) -> Answer:
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


def session(parent: Parent[ToChild]) -> None:
    """Serve the controller until it hangs up."""
    # The log is for its last lines, and those are for errors.
    logging.disable_progress_bar()
    requests = iter(parent)
    settings = next(requests)
    if not isinstance(settings, TrainerSettings):
        raise TypeError(f"the first message must be TrainerSettings, not {type(settings).__name__}")
    torch.set_num_threads(settings.threads)
    learner = Learner(settings)
    parent.send(Answer(0, learner.limits))
    for message in requests:
        if isinstance(message, TrainerSettings):
            raise TypeError("TrainerSettings came twice")
        parent.send(_carry_out(learner, message))


if __name__ == "__main__":
    Parent.serve(ToChild, session)  # type: ignore[arg-type]
