"""What the controller asks of an engine, and what it refuses to believe.

An engine takes token ids and returns token ids, behaviour logprobs and the policy version of each token. It knows
nothing of tasks, groups, rewards or staleness.
"""

import math
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from staleflow._core import first_malformed_token
from staleflow.errors import ConfigError, EngineReplyError
from staleflow.types import GenerateRequest, Generation


class Engine(Protocol):
    """One inference engine. Everything but ``start`` may be called only between ``start`` and ``stop``.

    An engine that has died is stopped, and may be started again; then it knows nothing of its life before.
    """

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
        """Continue a prompt. Cancelling the call cancels the request.

        Raises :class:`EngineError` when this request cannot be served, and :class:`EngineGoneError` when the engine has
        died; it may also stay silent then, since :meth:`run` tells.
        """

    async def interrupt(self, request_id: str) -> None:
        """Let go of a request: its ``generate`` returns the tokens sampled so far, maybe none, as ``"interrupted"``.

        One that has just sampled its last token ends by ``"stop"`` or ``"length"`` as always. Nothing happens if the
        request has ended already; whoever must be sure asks again.
        """

    async def update_weights(self, version: int, weights: Path) -> int:
        """Swap in the weights of a folder between two decode steps, keeping running requests; returns the version now
        served. An engine that raises :class:`EngineError` is taken for dead: it may hold half of the weights.

        As ``generate``, this may stay silent, like ``pause`` and ``resume``, when the engine has died.
        """

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
    """Refuse a malformed reply at the door; raises :class:`EngineReplyError` that names what is wrong.

    ``oldest`` is the version that the engine had confirmed when it got the request: an older token would be staler than
    anyone has accounted for. No token id is as large as ``vocabulary``, if that is known.
    """
    wrong = _malformation(request, generation, oldest, published) or _foreign_token(generation, vocabulary)
    if wrong is not None:
        raise EngineReplyError(f"engine reply to {request.request_id} refused: {wrong}")


def _foreign_token(generation: Generation, vocabulary: int | None) -> str | None:
    tokens = generation.token_ids
    if (smallest := min(tokens, default=0)) < 0:
        wrong = smallest
    elif vocabulary is not None and (largest := max(tokens, default=0)) >= vocabulary:
        wrong = largest
    else:
        return None
    known = "" if vocabulary is None else f" of {vocabulary}"
    return f"token id {wrong} at position {tokens.index(wrong)} is outside of the vocabulary{known}"


def _malformation(request: GenerateRequest, generation: Generation, oldest: int, published: int) -> str | None:
    tokens, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
    if generation.request_id != request.request_id:
        return f"it answers request {generation.request_id}"
    if not len(tokens) == len(logprobs) == len(versions):
        return f"{len(tokens)} tokens, {len(logprobs)} logprobs and {len(versions)} versions; they must be as many"
    if generation.finish_reason == "truncated":
        return "it ended as truncated; an engine that is told to let go says interrupted"
    fewest = 1 if generation.finish_reason in ("stop", "length") else 0
    if not fewest <= len(tokens) <= request.max_new_tokens:
        return f"{len(tokens)} tokens; at least {fewest} and at most {request.max_new_tokens} were asked for"
    position = first_malformed_token(logprobs, versions, oldest, published)
    if position is None:
        return _malformed_prompt(request, generation.prompt_logprobs)
    logprob, version = logprobs[position], versions[position]
    if not oldest <= version <= published:
        return f"version {version} at token {position}; it must be between {oldest} and {published}"
    if position > 0 and version < versions[position - 1]:
        return f"versions go backwards, from {versions[position - 1]} to {version} at token {position}"
    return f"logprob {logprob} at token {position} is not the logarithm of a probability"


def _malformed_prompt(request: GenerateRequest, logprobs: list[float]) -> str | None:
    expected = len(request.token_ids) - 1 if request.prompt_logprobs else 0
    if logprobs and len(logprobs) != expected:
        return f"{len(logprobs)} prompt logprobs; {expected} were asked for"
    wrong = next((logprob for logprob in logprobs if not math.isfinite(logprob) or logprob > 1e-4), None)
    return None if wrong is None else f"prompt logprob {wrong} is not the logarithm of a probability"
