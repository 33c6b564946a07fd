"""The embedded engine, child side: ``python -m staleflow.engines.embedded_server FD``.

Data flow: the main thread takes requests off the wire and hands them to the continuous batching manager, whose own
thread decodes; a third thread sends what the manager has finished.

Invariant: a token's version is that of the weights whose forward pass sampled it. Weights change only inside the
manager's pause, that is between two decode steps, and every token carries the time at which its step ended; so the
last swap before that time names the version. Asynchronous batching would have a step in flight across the pause,
and prefix sharing would serve key-value blocks of older weights to new prompts: both are off.
"""

import bisect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.utils import logging

from staleflow.engines.embedded import (
    Cancel,
    Done,
    Generate,
    Generated,
    GenerateFailed,
    Interrupt,
    Pause,
    Ready,
    Resume,
    Setup,
    ToChild,
    UpdateWeights,
)
from staleflow.process import Parent
from staleflow.types import FinishReason, GenerateRequest, Generation

PAGE_TOKENS = 16
MAX_BATCH_TOKENS = 1024


class VersionHistory:
    """Which version was served at which time, by the process's performance counter in seconds."""

    def __init__(self) -> None:
        self._versions = [0]
        self._swapped_at: list[float] = []

    @property
    def current(self) -> int:
        """The version now served."""
        return self._versions[-1]

    def swapped(self, version: int, at: float) -> None:
        """Record that from ``at`` on every step uses ``version``."""
        self._swapped_at.append(at)
        self._versions.append(version)

    def of(self, tokens: int, step_times: list[float], oldest: int) -> list[int]:
        """Version of each of ``tokens`` tokens, given the end times of the steps that sampled the last of them.

        A request that was evicted from the cache and prefilled again has lost the times of its first tokens. They
        get ``oldest``, the version served when the request came, which no token of it can be older than.
        """
        untimed = tokens - len(step_times)
        return [oldest] * untimed + [self._versions[bisect.bisect(self._swapped_at, at)] for at in step_times]


class CancellableScheduler(FIFOScheduler):
    """First come, first served, and no standstill when the requests that all others wait for are cancelled.

    Once the cache was full, the base class starts nothing new until a running request has *finished*. If those are
    cancelled instead, that never comes.

    Args:
        cancelled: told of every request that is taken out, with what it has sampled, between two decode steps.
    """

    def __init__(self, cancelled: Callable[[RequestState], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cancelled = cancelled

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Take cancelled requests out; the cache they held may let others in."""
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        if cancelled:
            self.block_new_requests = False
        for request in cancelled:
            self._cancelled(request)
        return cancelled


class Server:
    """The model, its decode loop and the requests in flight."""

    def __init__(self, setup: Setup, parent: Parent[ToChild]) -> None:
        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype="auto", attn_implementation="sdpa", local_files_only=True
        ).to(device)  # type: ignore[arg-type]
        end_token_ids = model.generation_config.eos_token_id
        if end_token_ids is None:
            end_token_ids = model.config.eos_token_id
        SCHEDULER_MAPPING["cancellable"] = partial(  # type: ignore[assignment] # it is only ever called
            CancellableScheduler, self._deliver_interrupted
        )
        self._manager: ContinuousBatchingManager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=setup.temperature,
                top_k=0,
                eos_token_id=-1 if end_token_ids is None else end_token_ids,
                max_new_tokens=setup.cache_tokens,
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=-(-setup.cache_tokens // PAGE_TOKENS),
                max_batch_tokens=max(MAX_BATCH_TOKENS, setup.capacity),
                max_requests_per_batch=setup.capacity,
                allow_block_sharing=False,
                use_async_batching=False,
                scheduler_type="cancellable",
                return_logprobs=True,
                auto_switch_to_flash=False,
                seed=setup.seed,
            ),
        )
        self._parameters = dict(model.named_parameters())
        self._end_token_ids = {end_token_ids} if isinstance(end_token_ids, int) else set(end_token_ids or ())
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._device = device
        self._parent = parent
        self._history = VersionHistory()
        self._oldest: dict[str, int] = {}
        self._paused = ExitStack()
        # The decode thread inherits this mode and is faster for it; weights stay ordinary tensors that can be updated.
        with torch.inference_mode():
            self._manager.start()
        threading.Thread(target=self._deliver, name="deliver", daemon=True).start()
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or setup.cache_tokens
        self._max_model_tokens = min(limit, setup.cache_tokens)
        parent.send(Ready(self._max_model_tokens, self._vocabulary))

    def handle(self, message: ToChild) -> None:
        """Act on one request of the controller."""
        match message:
            case Generate(request):
                self._queue(request)
            case Cancel(request_id):
                if self._oldest.pop(request_id, None) is not None:
                    self._manager.cancel_request(request_id)
            case Interrupt(request_id):
                if request_id in self._oldest:
                    self._manager.cancel_request(request_id)
            case UpdateWeights(version, weights):
                self._swap(version, Path(weights))
                self._parent.send(Done(self._history.current))
            case Pause():
                self._paused.enter_context(self._manager.pause())
                self._parent.send(Done(self._history.current))
            case Resume():
                self._paused.close()
                self._parent.send(Done(self._history.current))
            case Setup():
                raise RuntimeError("Setup came twice")
            case _:
                assert_never(message)

    def _queue(self, request: GenerateRequest) -> None:
        # Past this point a request that cannot be served would end the decode loop, and every other request with it.
        length = len(request.token_ids) + request.max_new_tokens
        if not request.token_ids or request.max_new_tokens < 1 or length > self._max_model_tokens:
            error = f"{len(request.token_ids)} prompt tokens and {request.max_new_tokens} new ones"
            error = f"{error}; there must be some of each, and at most {self._max_model_tokens} together"
            self._parent.send(GenerateFailed(request.request_id, error))
        elif not 0 <= min(request.token_ids) <= max(request.token_ids) < self._vocabulary:
            error = f"a prompt token outside of the vocabulary of {self._vocabulary}"
            self._parent.send(GenerateFailed(request.request_id, error))
        else:
            self._oldest[request.request_id] = self._history.current
            self._manager.add_request(
                request.token_ids,
                request_id=request.request_id,
                max_new_tokens=request.max_new_tokens,
                record_timestamps=True,
            )

    def _swap(self, version: int, weights: Path) -> None:
        # Read before the pause, so that decoding stops for the copy only.
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(weights.glob("*.safetensors")):
            tensors |= load_file(path)
        if tensors.keys() != self._parameters.keys():
            different = sorted(tensors.keys() ^ self._parameters.keys())[:3]
            raise RuntimeError(f"the weights of version {version} belong to another model: {different} ...")
        with self._manager.pause(), torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[name])
            if self._device == "cuda":
                # Decoding has a stream of its own, which does not wait for these copies.
                torch.cuda.synchronize()
            self._history.swapped(version, time.perf_counter())

    def _deliver(self) -> None:
        try:
            for output in self._manager:
                # Only a decode loop that ends fails a request, and it has written its traceback to the log.
                if output.error is not None:
                    break
                oldest = self._oldest.pop(output.request_id, None)
                if oldest is not None:
                    stopped = output.generated_tokens[-1] in self._end_token_ids
                    self._send(output, oldest, "stop" if stopped else "length")
        except Exception:  # noqa: BLE001 - the last frame of the thread: print, then exit
            traceback.print_exc()
        # From here on no request would ever be answered.
        sys.stderr.flush()
        os._exit(1)

    def _deliver_interrupted(self, request: RequestState) -> None:
        # Of one that the controller has cancelled nobody wants to hear; its entry is gone.
        oldest = self._oldest.pop(request.request_id, None)
        if oldest is not None:
            self._send(request.to_generation_output(), oldest, "interrupted")

    def _send(self, output: GenerationOutput, oldest: int, finish_reason: FinishReason) -> None:
        tokens = output.generated_tokens
        versions = self._history.of(len(tokens), output.timestamps or [], oldest)
        self._parent.send(Generated(Generation(output.request_id, tokens, output.logprobs, versions, finish_reason)))


def session(parent: Parent[ToChild]) -> None:
    """Serve the controller until it hangs up."""
    # The log is for its last lines, and those are for errors.
    logging.disable_progress_bar()
    requests = iter(parent)
    setup = next(requests)
    if not isinstance(setup, Setup):
        raise TypeError(f"the first message must be Setup, not {type(setup).__name__}")
    server = Server(setup, parent)
    for message in requests:
        server.handle(message)


if __name__ == "__main__":
    Parent.serve(ToChild, session)  # type: ignore[arg-type]
