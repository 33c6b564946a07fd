"""Weights into real servers. Each version says one token with certainty, so every token tells who has made it."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from staleflow.parameter_server.tcp import TcpParameterServer
from staleflow.testing import character_llama

from .conftest import ALPHABET, RealServer, RequestError, publish_always

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

REQUESTS = 4
ENDLESS_TOKENS = 16_000


@pytest.fixture(scope="module")
def versions() -> Iterator[int]:
    return itertools.count(1)


@pytest.fixture
def server(servers: list[RealServer]) -> RealServer:
    return servers[0]


def token_of(version: int) -> int:
    return 2 + version % len(ALPHABET)


def update_from_folder(server: RealServer, weights: TcpParameterServer, version: int) -> None:
    with weights.pulling(version) as folder:
        source = {"version": version, "folder": str(folder)}
        assert server.prefetch(source)["state"] == "ready"
        server.update(source)


def runs(reply: dict[str, Any]) -> list[tuple[str, set[int]]]:
    """The versions of a reply in order, with the tokens that each has made."""
    assert reply["weight_versions"][-1]["end"] == len(reply["token_ids"])
    return [(run["version"], set(reply["token_ids"][run["start"] : run["end"]])) for run in reply["weight_versions"]]


def test_running_requests_go_on_with_new_weights_and_say_which_token_is_whose(
    server: RealServer, weights: TcpParameterServer, model: Path, versions: Iterator[int]
) -> None:
    updates = [next(versions) for _ in range(3)]
    for version in updates:
        publish_always(weights, version, model, token_of(version))
    with ThreadPoolExecutor() as pool:
        update_from_folder(server, weights, updates[0])
        replies = [pool.submit(server.generate, ENDLESS_TOKENS, f"request-{number}") for number in range(REQUESTS)]
        server.wait_for_running(REQUESTS)
        server.wait_for_tokens(8 * REQUESTS)
        for version in updates[1:]:
            update_from_folder(server, weights, version)
            server.wait_for_tokens(8 * REQUESTS)
        server.post("/abort_requests")
        for reply in replies:
            assert reply.result()["finish_reason"] == "abort"
            assert runs(reply.result()) == [(str(version), {token_of(version)}) for version in updates]
    assert server.version() == str(updates[-1])


def test_weights_of_another_model_are_refused_and_the_old_ones_served_on(
    server: RealServer, weights: TcpParameterServer, model: Path, versions: Iterator[int], tmp_path: Path
) -> None:
    served, refused = next(versions), next(versions)
    publish_always(weights, served, model, token_of(served))
    update_from_folder(server, weights, served)
    other = character_llama(tmp_path / "other", ALPHABET, hidden_size=128)
    with weights.publishing(refused) as folder:
        save_file(load_file(other / "model.safetensors"), folder / "model.safetensors")
    with weights.pulling(refused) as folder:
        source = {"version": refused, "folder": str(folder)}
        progress = server.prefetch(source)
        assert progress["state"] == "failed"
        assert "weights of another model: model.embed_tokens.weight is of shape" in progress["error"]
        with pytest.raises(RequestError, match=f"version {refused} refused: these are weights of another model"):
            server.update(source)
    assert server.version() == str(served)
    assert runs(server.generate(8)) == [(str(served), {token_of(served)})]


def test_weights_without_one_of_the_parameters_are_refused(
    server: RealServer, weights: TcpParameterServer, model: Path, versions: Iterator[int]
) -> None:
    parameters = load_file(model / "model.safetensors")
    del parameters["model.norm.weight"]
    version = next(versions)
    with weights.publishing(version) as folder:
        save_file(parameters, folder / "model.safetensors")
    with weights.pulling(version) as folder, pytest.raises(RequestError, match=r"model\.norm\.weight is missing"):
        server.update({"version": version, "folder": str(folder)})


def test_weights_are_pulled_over_tcp(
    servers: list[RealServer], weights: TcpParameterServer, model: Path, versions: Iterator[int]
) -> None:
    version = next(versions)
    publish_always(weights, version, model, token_of(version))
    source = {"version": version, "address": weights.address}
    for server in servers:
        progress = server.prefetch(source)
        assert progress["error"] == ""
        assert progress["pulled_bytes"] == progress["total_bytes"] > (model / "model.safetensors").stat().st_size / 2
        server.update(source)
        assert runs(server.generate(8)) == [(str(version), {token_of(version)})]


def test_version_that_cannot_be_pulled_is_refused(
    server: RealServer, weights: TcpParameterServer, versions: Iterator[int]
) -> None:
    before = server.version()
    with pytest.raises(RequestError, match="refuses version 1000000: version 1000000 cannot be pulled"):
        server.update({"version": 1_000_000, "address": weights.address})
    with pytest.raises(RequestError, match="needs either a folder or an address"):
        server.update({"version": 1_000_000})
    assert server.version() == before


def test_update_that_its_client_broke_off_leaves_the_server_usable(
    server: RealServer, weights: TcpParameterServer, model: Path, versions: Iterator[int]
) -> None:
    before, version = server.version(), next(versions)
    publish_always(weights, version, model, token_of(version))
    server.post("/start_weight_update")
    with pytest.raises(RequestError, match="already active"):
        server.post("/start_weight_update")
    server.post("/finish_weight_update")
    assert server.version() == before
    # Without a prefetch the server pulls while it is paused.
    with weights.pulling(version) as folder:
        server.update({"version": version, "folder": str(folder)})
    assert runs(server.generate(8)) == [(str(version), {token_of(version)})]
