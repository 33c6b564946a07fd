"""What the controller asks of a trainer.

A trainer turns a batch of whole groups into a gradient step and writes weights where it is told. It knows nothing
of engines, of versions beyond the number it is given, or of how the batch was chosen.
"""

from pathlib import Path
from typing import Protocol

from staleflow.types import ModelLimits, StepMetrics, TrainBatch


class Trainer(Protocol):
    """Everything but ``start`` may be called only between ``start`` and ``stop``, one call at a time."""

    @property
    def settings(self) -> object:
        """What it was made with, as something msgspec can encode: it goes into the run folder."""

    @property
    def limits(self) -> ModelLimits:
        """What its model can be given, known after ``start``; compared with what the engines report."""

    async def start(self, log_folder: Path) -> None:
        """Load the initial weights. Raises :class:`TrainerError`."""

    async def run(self) -> None:
        """Watch until cancelled. Raises :class:`TrainerError` when the trainer dies."""

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Train on one batch."""

    async def publish(self, weights: Path) -> None:
        """Write the present weights into an empty folder: safetensors files, each parameter in one of them."""

    async def save(self, folder: Path) -> None:
        """Write a checkpoint that transformers can load; replaces an older one in one step."""

    async def save_state(self, folder: Path) -> None:
        """Write all it takes to train on as if there had been no interruption, optimizer included, to a new folder."""

    async def load_state(self, folder: Path) -> None:
        """Become what :meth:`save_state` has written; only before the first step. Raises :class:`TrainerError`."""

    async def stop(self) -> None:
        """End the trainer and its processes. Idempotent."""
