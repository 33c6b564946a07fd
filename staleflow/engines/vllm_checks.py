"""What must be true of a vLLM server before anything that it says is believed.

Each check is for a mistake that would otherwise show late or never, as logprobs of another distribution, tokens of
another model, or weights that do not arrive; its error names the flag or setting to change. Everything is checked that
the server tells about itself. What it does not tell is left to the first request and the first update.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from staleflow.engines.vllm_api import ServerInfo, VllmApi
from staleflow.engines.vllm_plugin import BACKEND, WORKER_EXTENSION
from staleflow.engines.vllm_requests import VllmRequests
from staleflow.errors import ConfigError, EngineError, EngineReplyError, EngineStatusError
from staleflow.types import GenerateRequest

OLDEST_VLLM = (0, 32)
FIRST_UNSUPPORTED_VLLM = (1, 0)
NCCL = "nccl"
NEEDED_FLAGS = f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}' --worker-extension-cls {WORKER_EXTENSION}"""
PROBED_TOKENS = 256
PROBES = ("The 3 quick brown foxes\n\tjump over 12+34=46?", "naïve Ünïcode 東京 😀", "abcdefghijklmnopqrstuvwxyz")
SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
NO_ENDPOINT = {403, 404, 405}
"""What a server answers where it does not offer an endpoint."""


class ServedModel(msgspec.Struct, frozen=True):
    """The model behind a URL: the name that requests must give, the longest sequence that it serves, how many token ids
    it has, if its configuration says, and how many workers share it."""

    name: str
    max_tokens: int
    vocabulary: int | None
    workers: int


async def check_server(api: VllmApi, model: Path, tokenizer: Tokenizer | None, *, backend: str) -> ServedModel:
    """Refuse a server that is not fit for training; ``model`` and ``tokenizer`` are what it should serve, ``backend``
    is how it should take new weights.

    Raises :class:`EngineError` that says what to change.
    """
    await _check_version(api)
    await _check_development_endpoints(api)
    info = await api.server_info()
    _check_settings(api, info, backend)
    models = await api.models()
    if not models:
        raise EngineError(f"{api.name} at {api.url} offers no model")
    parallel = info.vllm_config.parallel_config
    served = ServedModel(
        models[0].id,
        models[0].max_model_len,
        _configuration(model).get("vocab_size"),
        parallel.world_size * parallel.data_parallel_size,
    )
    _check_shape(api, Path(models[0].root), model)
    if tokenizer is not None:
        await _check_tokenizer(api, served.name, model, tokenizer)
    return served


async def _check_version(api: VllmApi) -> None:
    try:
        version = await api.version()
    except (EngineStatusError, EngineReplyError) as error:
        raise EngineError(f"{api.url} is no vLLM server: {error}") from error
    oldest, first_unsupported = (".".join(map(str, numbers)) for numbers in (OLDEST_VLLM, FIRST_UNSUPPORTED_VLLM))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST_VLLM <= (int(found[1]), int(found[2])) < FIRST_UNSUPPORTED_VLLM:
        raise EngineError(
            f"{api.name} at {api.url} runs vLLM {version}; install a version there that is at least {oldest} and "
            f"below {first_unsupported}"
        )


async def _check_development_endpoints(api: VllmApi) -> None:
    try:
        await api.is_paused()
        await api.weight_label()
    except EngineStatusError as error:
        if error.status not in NO_ENDPOINT:
            raise
        raise EngineError(
            f"{api.name} at {api.url} offers no endpoints to pause it and to update its weights: start it with the "
            f"environment variable VLLM_SERVER_DEV_MODE=1 ({error})"
        ) from error


def _check_settings(api: VllmApi, info: ServerInfo, backend: str) -> None:
    config = info.vllm_config
    who = f"{api.name} at {api.url}"
    if config.model_config.logprobs_mode != "processed_logprobs":
        raise EngineError(
            f"{who} reports {config.model_config.logprobs_mode}, which are not those of the distribution that it "
            "samples from: start it with --logprobs-mode processed_logprobs"
        )
    transfer = config.weight_transfer_config
    if transfer is None or transfer.backend != backend:
        found = "no weight transfer" if transfer is None else f"the weight transfer {transfer.backend!r}"
        if backend == NCCL:
            raise EngineError(
                f"{who} has {found}, so nothing can be broadcast to it: start it with "
                f"""--weight-transfer-config '{{"backend": "{NCCL}"}}', or leave broadcast_from out"""
            )
        raise EngineError(
            f"{who} has {found}, so it cannot take new weights from staleflow: install staleflow in its environment "
            f"and start it with {NEEDED_FLAGS}"
        )
    if backend == BACKEND and config.parallel_config.worker_extension_cls != WORKER_EXTENSION:
        raise EngineError(
            f"{who} has workers that cannot pull weights while they generate: start it with {NEEDED_FLAGS}"
        )


def _check_shape(api: VllmApi, root: Path, model: Path) -> None:
    """Compare the folder that the server has loaded, if this machine can see it."""
    if not (root / "config.json").is_file():
        return
    served, expected = _configuration(root), _configuration(model)
    different = [
        f"{key} {served.get(key)} instead of {expected.get(key)}"
        for key in SHAPES
        if served.get(key) != expected.get(key)
    ]
    if different:
        raise EngineError(f"{_another_model(api, model)}: it was loaded from {root}, with {', '.join(different)}")


def _another_model(api: VllmApi, model: Path) -> str:
    return (
        f"{api.name} at {api.url} serves another model than {model} (start it with --model of the same folder, or give "
        "VllmEngine the folder that it serves)"
    )


def _configuration(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no configuration of a model: {error}") from error


async def _check_tokenizer(api: VllmApi, name: str, model: Path, tokenizer: Tokenizer) -> None:
    for text, expected in _probes(tokenizer).items():
        try:
            found = await api.tokenize(name, text)
        except EngineStatusError as error:
            raise EngineError(
                f"{api.name} at {api.url} has no tokenizer to compare with that of {model}: {error}"
            ) from error
        if found != expected:
            raise EngineError(
                f"{api.name} at {api.url} has another tokenizer than {model}: it reads {text!r} as {found}, not as "
                f"{expected}; start it with --tokenizer of the same folder"
            )


def _probes(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Texts, one of them in the tokenizer's own words, and how it reads them."""
    own_words = tokenizer.decode(list(range(min(PROBED_TOKENS, tokenizer.get_vocab_size()))))
    probes = {}
    for text in (*PROBES, own_words):
        try:
            probes[text] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # noqa: BLE001 - nothing more special is raised for a text that it has no words for
            continue
    return probes


async def check_first_answer(api: VllmApi, requests: VllmRequests, model: Path) -> None:
    """Let the server sample one token after the last one of the model's vocabulary, the way it will sample all others.

    A server that does not offer the endpoint which reports versions is used without from here on.
    """
    last_token = int(_configuration(model).get("vocab_size", 1)) - 1
    request = GenerateRequest("first", [last_token], max_new_tokens=1)
    try:
        try:
            await requests.generate(request)
        except EngineStatusError as error:
            if error.status not in NO_ENDPOINT:
                raise
            requests.reports_versions = False
            await requests.generate(request)
    except EngineStatusError as error:
        if "vocabulary" not in str(error):
            raise
        raise EngineError(f"{_another_model(api, model)}: {error}") from error
