"""Public fakes: run a whole pipeline in milliseconds, without processes, models or sleeping.

:func:`run_virtually` runs a coroutine on a :class:`VirtualClock`, whose time jumps to the next timer whenever
nothing else can happen. With :class:`ScriptedEngine` and :class:`ScriptedTrainer` in place of the real ones, a run is
a function of its seed: the same seed writes the same event log, byte for byte.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tokenizers import Tokenizer

from staleflow.errors import TrainerError
from staleflow.types import FinishReason, GenerateRequest, Generation, ModelLimits, StepMetrics, TrainBatch

Result = TypeVar("Result")

Script: TypeAlias = Callable[[GenerateRequest, random.Random], Sequence[int]]
"""The tokens an engine answers with, given the request and a random generator of its own."""


class VirtualDeadlockError(RuntimeError):
    """Nothing is ready, no timer is set: on a real clock the program would now hang for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the time to where the wait would have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.time_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise VirtualDeadlockError("every task waits for another one, and no timer is set")
            self.time_s += timeout
        return ready


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop on which time passes only in jumps. For code without processes and sockets.

    What is sent to a thread is done at once instead, so that nothing depends on which thread is faster.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.time_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Result], *args: Any
    ) -> "asyncio.Future[Result]":
        """Do it now; the future is done."""
        future: asyncio.Future[Result] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Run ``main`` on a new :class:`VirtualClock`; raises :class:`VirtualDeadlockError` where it would hang."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(main)


def digits(request: GenerateRequest, rng: random.Random) -> Sequence[int]:
    """A :data:`Script`: between one token and as many as were asked for, each from 0 to 9."""
    return [rng.randrange(10) for _ in range(rng.randint(1, request.max_new_tokens))]


class ScriptedEngine:
    """An engine that answers from a script, a token at a time, and swaps versions between tokens.

    Args:
        script: what to answer; the random generator depends on ``seed`` and the request's id alone.
        seed: of the answers and of how long each token takes.
        token_s: mean seconds per token, exponentially distributed.
        update_s: seconds a weight update takes.
        capacity: requests run at once, as far as the coordinator is told.
        tokenizer: for prompts that are text.
        vocabulary: how many token ids it reports to have; None reports nothing.

    It may be started again after a :meth:`stop`; then it serves version 0 and has forgotten its requests. The logprob
    of every sampled token is -1, that of a prompt token -1 less the version.
    """

    def __init__(
        self,
        script: Script = digits,
        *,
        seed: int = 0,
        token_s: float = 0.01,
        update_s: float = 0.05,
        capacity: int = 64,
        tokenizer: Tokenizer | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.settings = {"seed": seed, "token_s": token_s, "update_s": update_s, "capacity": capacity}
        self.capacity = capacity
        self.max_model_tokens = 4096
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.stopped = False
        self._script = script
        self._seed = seed
        self._token_s = token_s
        self._update_s = update_s
        self._running: set[str] = set()
        self._decoding = asyncio.Event()
        self._decoding.set()

    async def start(self, name: str, log_folder: Path) -> None:
        """Serve the initial weights."""
        self.version = 0
        self.stopped = False
        self._running.clear()
        self._decoding.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        await asyncio.Event().wait()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Answer from the script."""
        self.requests.append(request)
        rng = random.Random(f"{self._seed}/{request.request_id}")
        token_ids = list(self._script(request, rng))
        versions = []
        self._running.add(request.request_id)
        for _ in token_ids:
            await asyncio.sleep(rng.expovariate(1 / self._token_s))
            await self._decoding.wait()
            if request.request_id not in self._running:
                break
            versions.append(self.version)
        sampled = len(versions)
        ended: FinishReason = "length" if sampled == request.max_new_tokens else "stop"
        finish_reason: FinishReason = ended if sampled == len(token_ids) else "interrupted"
        self._running.discard(request.request_id)
        prompt_logprobs = (
            [-1.0 - versions[0]] * (len(request.token_ids) - 1) if request.prompt_logprobs and sampled else []
        )
        return Generation(
            request.request_id, token_ids[:sampled], [-1.0] * sampled, versions, finish_reason, prompt_logprobs
        )

    async def interrupt(self, request_id: str) -> None:
        """Let go of a request in place of its next token."""
        self._running.discard(request_id)

    async def update_weights(self, version: int, weights: Path) -> int:
        """Serve ``version`` from now on."""
        await asyncio.sleep(self._update_s)
        self.version = version
        return version

    async def pause(self) -> None:
        """Sample no further token."""
        self._decoding.clear()

    async def resume(self) -> None:
        """Go on sampling."""
        self._decoding.set()

    async def stop(self) -> None:
        """Remember that it was stopped."""
        self.stopped = True


class ScriptedTrainer:
    """A trainer that takes its time and learns nothing; ``batches`` are the ones it was given.

    Its state is ``steps``, the number of steps it has made, those before a resume included.

    Args:
        step_s: seconds a step takes.
        publish_s: seconds a publish takes.
        save_s: seconds that saving its state takes, half of them with half of it written.
        limits: what it reports of its model.
    """

    def __init__(
        self, *, step_s: float = 0.2, publish_s: float = 0.02, save_s: float = 0.0, limits: ModelLimits | None = None
    ) -> None:
        self.settings = {"step_s": step_s, "publish_s": publish_s}
        self.limits = limits or ModelLimits()
        self.batches: list[TrainBatch] = []
        self.saved: list[Path] = []
        self.steps = 0
        self.stopped = False
        self._step_s = step_s
        self._publish_s = publish_s
        self._save_s = save_s

    async def start(self, log_folder: Path) -> None:
        """Nothing to load."""

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.Event().wait()

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """Keep the batch."""
        await asyncio.sleep(self._step_s)
        self.batches.append(batch)
        self.steps += 1
        tokens = sum(trajectory.sampled_tokens for trajectory in batch.trajectories)
        return StepMetrics(loss=0.0, gradient_norm=0.0, tokens=tokens)

    async def publish(self, weights: Path) -> None:
        """Write an empty weights file."""
        await asyncio.sleep(self._publish_s)
        (weights / "weights.safetensors").touch()

    async def save(self, folder: Path) -> None:
        """Remember where to."""
        self.saved.append(folder)

    async def save_state(self, folder: Path) -> None:
        """Write the number of steps, twice."""
        folder.mkdir()  # noqa: ASYNC240 - on a virtual clock nothing else could run meanwhile
        for half in ("first", "second"):
            (folder / half).write_text(str(self.steps))
            await asyncio.sleep(self._save_s / 2)

    async def load_state(self, folder: Path) -> None:
        """Read them back."""
        first, second = (int((folder / half).read_text()) for half in ("first", "second"))
        if first != second:
            raise TrainerError(f"{folder} holds one half of step {first} and one of step {second}")
        self.steps = first

    async def stop(self) -> None:
        """Remember that it was stopped."""
        self.stopped = True


def character_llama(
    folder: str | Path, alphabet: str, *, hidden_size: int = 64, layers: int = 2, max_tokens: int = 64, seed: int = 0
) -> Path:
    """Make a small Llama with random weights and one token per character, for tests and examples.

    Writes a Hugging Face folder, tokenizer included, with ``<pad>`` and ``<eos>`` beside ``alphabet``; needs torch
    and transformers. Returns the folder.
    """
    import torch
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *dict.fromkeys(alphabet)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(vocabulary),
                hidden_size=hidden_size,
                intermediate_size=4 * hidden_size,
                num_hidden_layers=layers,
                num_attention_heads=max(1, hidden_size // 32),
                max_position_embeddings=max_tokens,
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=vocabulary["<eos>"],
                pad_token_id=vocabulary["<pad>"],
            )
        )
    model.save_pretrained(folder)
    return Path(folder)
