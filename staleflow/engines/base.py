"""What the controller asks of an engine, and what it refuses to believe.

An engine takes token ids and returns token ids, behaviour logprobs and the policy version of each token. It knows
nothing of tasks, groups, rewards or staleness.
"""

import itertools
import math
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from staleflow.errors import ConfigError, EngineError
from staleflow.types import GenerateRequest, Generation


class Engine(Protocol):
    """One inference engine. Everything but ``start`` may be called only between ``start`` and ``stop``."""

    @property
    def settings(self) -> object:
        """What it was made with, as something msgspec can encode: it goes into the run folder."""

    @property
    def capacity(self) -> int:
        """How many requests it can usefully run at once."""

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence, prompt and generated tokens together, that it can serve."""

    @property
    def vocabulary(self) -> int | None:
        """How many token ids its model has, known after ``start``; None if the engine cannot tell."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when prompts can only be token ids."""

    async def start(self, name: str, log_folder: Path) -> None:
        """Load the initial weights (version 0). Raises :class:`EngineError`."""

    async def run(self) -> None:
        """Serve until cancelled. Raises :class:`EngineError` when the engine dies."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Continue a prompt. Cancelling the call cancels the request."""

    async def truncate(self, request_id: str) -> None:
        """End a request early: its ``generate`` returns the tokens sampled so far, maybe none, as ``"truncated"``.

        Nothing happens if the request has ended already.
        """

    async def update_weights(self, version: int, weights: Path) -> int:
        """Swap in the weights of a folder between two decode steps, keeping running requests; returns the version now
        served."""

    async def pause(self) -> None:
        """Stop decoding after the current step; running requests keep their cache."""

    async def resume(self) -> None:
        """Go on decoding after :meth:`pause`."""

    async def stop(self) -> None:
        """End the engine and its process. Idempotent."""


def load_tokenizer(model: Path) -> Tokenizer | None:
    """The fast tokenizer of a model folder, if it has one; raises :class:`ConfigError` if that is damaged."""
    path = model / "tokenizer.json"
    if not path.exists():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigError(f"tokenizer {path} cannot be read: {error}") from error


def check_generation(
    request: GenerateRequest, generation: Generation, *, oldest: int, published: int, vocabulary: int | None = None
) -> None:
    """Refuse a malformed reply at the door; raises :class:`EngineError` that names what is wrong.

    ``oldest`` is the version the request was allowed to start from: an older token would be staler than the ledger
    has accounted for. No token id is as large as ``vocabulary``, if that is known.
    """
    wrong = _malformation(request, generation, oldest, published) or _foreign_token(generation, vocabulary)
    if wrong is not None:
        raise EngineError(f"engine reply to {request.request_id} refused: {wrong}")


def _foreign_token(generation: Generation, vocabulary: int | None) -> str | None:
    for position, token in enumerate(generation.token_ids):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            known = "" if vocabulary is None else f" of {vocabulary}"
            return f"token id {token} at position {position} is outside of the vocabulary{known}"
    return None


def _malformation(request: GenerateRequest, generation: Generation, oldest: int, published: int) -> str | None:
    tokens, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
    if generation.request_id != request.request_id:
        return f"it answers request {generation.request_id}"
    if not len(tokens) == len(logprobs) == len(versions):
        return f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions; they must be as many"
    fewest = 1 if generation.finish_reason in ("stop", "length") else 0
    if not fewest <= len(tokens) <= request.max_new_tokens:
        return f"{len(tokens)} tokens; at least {fewest} and at most {request.max_new_tokens} were asked for"
    for position, (logprob, version) in enumerate(zip(logprobs, versions, strict=True)):
        # Rounding in float32 can lift the logprob of a certain token a little above zero.
        if not math.isfinite(logprob) or logprob > 1e-4:
            return f"logprob {logprob} at token {position} is not the logarithm of a probability"
        if not oldest <= version <= published:
            return f"version {version} at token {position}; it must be between {oldest} and {published}"
    if any(later < earlier for earlier, later in itertools.pairwise(versions)):
        return f"versions go backwards: {versions}"
    return None
