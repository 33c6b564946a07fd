"""What the controller asks of a parameter server.

Invariant: a version is pullable from the moment it is published until it is neither among the newest kept nor
being pulled. Published weights never change, so a publish and any number of pulls need not wait for each other.

A version is a folder of one or more safetensors files, each parameter in exactly one of them under the name that
transformers gives it.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol


class ParameterServer(Protocol):
    """Holds published weights by version."""

    def publishing(self, version: int) -> AbstractContextManager[Path]:
        """A new folder to write weights to; published when the block ends without an error, discarded otherwise."""

    def pulling(self, version: int) -> AbstractContextManager[Path]:
        """The folder of published weights, which stay for as long as the block lasts."""

    def close(self) -> None:
        """Discard everything. Idempotent."""
