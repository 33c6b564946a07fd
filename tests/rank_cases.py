"""What the tests of several ranks compute, with one rank in the test's process and with two in processes of their own.

The latter run ``python -m rank_cases RANK PORT LISTENING_FD MODEL FOLDER`` and write what they come to into the folder.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from models import batch, figures, injected, pair, sampled, trajectory

from staleflow import LocalTrainer
from staleflow.trainer.learner import Learner
from staleflow.trainer.sharding import whole
from staleflow.types import TrainBatch

if TYPE_CHECKING:
    from staleflow.trainer.world import World

RANKS = 2


class Case(NamedTuple):
    """Settings of the trainer and the batches it is given, in order."""

    settings: dict[str, Any]
    batches: list[TrainBatch]


class Result(NamedTuple):
    """The metrics of every step, and the last update's gradient and the weights after it, by name."""

    metrics: list[dict[str, float]]
    gradient: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def lopsided() -> TrainBatch:
    """One long trajectory and six short ones: a rank each, if tokens are to be balanced."""
    members = [trajectory(0, 0, 1.0, injected(3, 4), sampled([5 + index % 7 for index in range(40)], [-2.5] * 40))]
    members += [trajectory(0, member, member / 9, injected(3), sampled([4 + member], [-2.4])) for member in range(1, 7)]
    return TrainBatch(0, [members])


def single() -> TrainBatch:
    """One trajectory: nothing for the other rank to do."""
    return TrainBatch(0, [[trajectory(0, 0, 1.0, injected(3), sampled([4, 5], [-2.5, -2.4]))]])


def cases(reference: Path) -> dict[str, Case]:
    """By name; all computed in one way by one rank, and in others by several."""
    two = [batch(0), batch(1)]
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    return {
        "a token's loss, several updates": Case({"loss": "decoupled_ppo", "minibatches": 2}, two),
        "a sequence's loss": Case({"loss": "gspo", "loss_parameters": wide}, two),
        "an update's loss": Case({"loss": "sat"}, two),
        "an update's loss, several updates": Case({"loss": "m2po", "minibatches": 2}, two),
        "a reference": Case({"loss": "decoupled_ppo", "reference": reference, "kl_weight": 0.3}, two),
        "passes of unequal number": Case({"loss": "ppo"}, [lopsided()]),
        "no sequence for one rank": Case({"loss": "ppo", "advantages": "constant"}, [single(), batch(1)]),
        "nothing to learn": Case({"loss": "ppo", "advantages": "group"}, [single(), batch(1)]),
    }


SOME = ("an update's loss, several updates", "a reference", "passes of unequal number")
"""Those that also show whether the rarer ways are right."""
WAYS: dict[str, dict[str, Any]] = {
    "sharded": {"micro_batch_tokens": 40},
    "replicated": {"micro_batch_tokens": 40, "sharded": False},
    "sharded, packed": {"micro_batch_tokens": 30, "packing": True},
    "sharded, recomputed": {"micro_batch_tokens": 1, "activation_checkpointing": True},
}


def name_and_way() -> list[tuple[str, str]]:
    """What two ranks compute."""
    return [(name, way) for way in WAYS for name in cases(Path()) if "," not in way or name in SOME]


def learner(model: Path, settings: dict[str, Any], world: "World | None" = None) -> Learner:
    ranks = 1 if world is None else world.size
    defaults = {"learning_rate": 1e-3, "warmup_steps": 4}
    return Learner(LocalTrainer(model, ranks=ranks, **(defaults | settings)).settings, world)


def weights(one: Learner) -> dict[str, torch.Tensor]:
    return {name: whole(value.detach()).clone() for name, value in one._model.named_parameters()}


def gradient(one: Learner) -> dict[str, torch.Tensor]:
    parameters = one._model.named_parameters()
    return {name: whole(value.grad).clone() for name, value in parameters if value.grad is not None}


def computed(one: Learner, batches: list[TrainBatch]) -> Result:
    metrics = [figures(one.step(data)) for data in batches]
    return Result(metrics, gradient(one), weights(one))


def compute_all(model: Path, folder: Path, world: "World") -> None:
    """Everything the tests look at, in one pair of processes, as starting them takes longer than the rest."""
    for name, way in name_and_way():
        case = cases(folder / "reference")[name]
        result = computed(learner(model, case.settings | WAYS[way], world), case.batches)
        torch.save(tuple(result), folder / f"{way}: {name} {world.rank}")
    rounded = learner(model, {"dtype": "bfloat16"}, world)
    torch.save(tuple(computed(rounded, [batch(0), batch(1)])), folder / f"bfloat16 {world.rank}")
    for way in ("sharded", "replicated"):
        keep(learner(model, WAYS[way], world), folder / way, world)


def keep(one: Learner, folder: Path, world: "World") -> None:
    """Go on from what one rank has saved, and write all that can be written."""
    one.load_state(folder.parent / "state of one")
    one.step(pair(1))
    one.write_weights(folder / "published")
    one.save(folder / "saved")
    one.save_state(folder / "state")
    torch.save((weights(one), one.note), folder / f"went on {world.rank}")


if __name__ == "__main__":
    from staleflow.trainer.world import meet

    torch.set_num_threads(1)
    rank, port, *listening = map(int, sys.argv[1:4] if sys.argv[3] != "-" else sys.argv[1:3])
    compute_all(Path(sys.argv[4]), Path(sys.argv[5]), meet(rank, RANKS, port, next(iter(listening), None), 60.0))
