"""Requests of the vLLM engine: asked, answered, interrupted, cancelled, and all that can go wrong with a reply."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from stub_vllm import COMPLETIONS, TOKEN_S, TOKENS, Fault, half, hang_up, raw, reply_of, silence, stall, status
from vllm_support import PROMPT, World, request, until

from staleflow.engines.base import check_generation
from staleflow.errors import EngineError, EngineReplyError, EngineStatusError, EngineTimeoutError
from staleflow.types import GenerateRequest, Generation


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def answered(world: World) -> Generation:
    return await world.engine.generate(request())


def test_a_request_is_sampled_from_the_plain_distribution_and_answered_token_by_token(world: World) -> None:
    generation = world.play(answered, temperature=0.7)
    assert generation.token_ids == list(range(10))
    assert generation.logprobs == pytest.approx([-token / 10 for token in range(10)])
    assert generation.versions == [0] * 10
    assert generation.finish_reason == "length"
    check_generation(request(), generation, oldest=0, published=0)
    (body,) = world.stub.bodies(TOKENS)
    assert body["token_ids"] == PROMPT
    assert body["model"] == "served"
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (0.7, 1.0, 0, 0.0)
    assert (sampling["repetition_penalty"], sampling["n"], sampling["logprobs"]) == (1.0, 1, 0)


def test_V9_every_token_has_the_version_that_sampled_it_not_the_one_at_completion(world: World) -> None:
    async def scene(world: World) -> Generation:
        running = asyncio.create_task(world.engine.generate(request(tokens=12)))
        for version in (2, 4, 6):
            await asyncio.sleep(3.5 * TOKEN_S)
            await world.engine.update_weights(version, world.folder)
        return await running

    versions = world.play(scene).versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 2, 4, 6}


def test_L9_an_interrupted_reply_keeps_every_token_with_its_version(world: World) -> None:
    async def scene(world: World) -> Generation:
        running = asyncio.create_task(world.engine.generate(request(tokens=100)))
        await asyncio.sleep(4.5 * TOKEN_S)
        await world.engine.update_weights(3, world.folder)
        await asyncio.sleep(2.5 * TOKEN_S)
        await world.engine.interrupt("1.0.0.0")
        return await running

    generation = world.play(scene)
    assert generation.finish_reason == "interrupted"
    assert generation.versions[:4] == [0] * 4
    assert set(generation.versions[4:]) == {3}
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.versions) < 100
    check_generation(request(tokens=100), generation, oldest=0, published=3)


def test_L18_an_abort_that_comes_before_the_request_is_scheduled_is_repeated_until_the_reply(world: World) -> None:
    world.stub.unscheduled_s = 0.0

    async def scene(world: World) -> Generation:
        world.stub.unscheduled_s = 3.0
        running = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        await until(lambda: TOKENS in world.stub.paths())
        await world.engine.interrupt("1.0.0.0")
        assert running.done() or not world.stub.running
        return await running

    generation = world.play(scene)
    assert world.stub.aborted_unknown >= 2
    assert generation.finish_reason == "interrupted"


def test_an_interrupted_request_that_has_sampled_nothing_is_an_empty_reply(world: World) -> None:
    async def scene(world: World) -> Generation:
        await world.engine.pause()
        running = asyncio.create_task(world.engine.generate(request(prompt_logprobs=True)))
        world.stub.answer = lambda reply: reply | {"prompt_logprobs": None}
        await until(lambda: bool(world.stub.running))
        await world.engine.interrupt("1.0.0.0")
        return await running

    generation = world.play(scene)
    assert generation == Generation("1.0.0.0", [], [], [], "interrupted", [])


def test_an_interrupt_that_is_never_heard_fails_the_request_in_the_end(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.always["/abort_requests"] = status(500)
        running = asyncio.create_task(world.engine.generate(request(tokens=10**9)))
        await until(lambda: bool(world.stub.running))
        await world.engine.interrupt("1.0.0.0")
        with pytest.raises(EngineTimeoutError, match=r"engine-0 did not let go of request 1\.0\.0\.0 in 30 s"):
            await running

    world.play(scene)


def test_to_interrupt_what_does_not_run_does_nothing(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.interrupt("1.0.0.0")
        await world.engine.generate(request())
        await world.engine.interrupt("1.0.0.0")

    world.play(scene)
    assert "/abort_requests" not in world.stub.paths()


def test_cancelling_a_request_aborts_it_on_the_server_by_the_servers_own_id(world: World) -> None:
    async def scene(world: World) -> None:
        running = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        await until(lambda: bool(world.stub.running))
        (server_id,) = world.stub.running
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not world.stub.running)
        assert world.stub.bodies("/abort_requests") == [{"request_ids": [server_id]}]
        assert server_id.startswith("generate-tokens-")

    world.play(scene)


def test_L11_the_late_reply_of_a_cancelled_attempt_is_counted_and_the_next_one_gets_its_own(world: World) -> None:
    async def scene(world: World) -> Generation:
        first = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        await until(lambda: bool(world.stub.running))
        first.cancel()
        await asyncio.wait({first})
        second = await world.engine.generate(request(tokens=3))
        await until(lambda: world.engine.late_answers == 1)
        return second

    generation = world.play(scene)
    assert len(generation.token_ids) == 3
    ids = [body["request_id"] for body in world.stub.bodies(TOKENS)]
    assert len(set(ids)) == 2


def test_a_reply_that_comes_after_its_abort_is_complete_is_taken_as_it_is(world: World) -> None:
    async def scene(world: World) -> Generation:
        world.stub.always["/abort_requests"] = status(200)
        running = asyncio.create_task(world.engine.generate(request()))
        await until(lambda: bool(world.stub.running))
        await world.engine.interrupt("1.0.0.0")
        return await running

    assert world.play(scene).finish_reason == "length"


def test_one_request_at_a_time_has_an_id(world: World) -> None:
    async def scene(world: World) -> None:
        running = asyncio.create_task(world.engine.generate(request()))
        await asyncio.sleep(TOKEN_S)
        with pytest.raises(EngineError, match=r"still at work on a request 1\.0\.0\.0"):
            await world.engine.generate(request())
        await running

    world.play(scene)


def test_prompt_logprobs_are_those_of_the_prompt_after_its_first_token(world: World) -> None:
    async def scene(world: World) -> Generation:
        return await world.engine.generate(request(prompt_logprobs=True))

    assert world.play(scene).prompt_logprobs == [-0.5, -0.5]
    assert world.stub.bodies(TOKENS)[0]["sampling_params"]["prompt_logprobs"] == 0


def test_prompt_logprobs_at_another_temperature_than_one_are_refused(world: World) -> None:
    async def scene(world: World) -> None:
        with pytest.raises(EngineError, match="vLLM computes them at temperature 1"):
            await world.engine.generate(request(prompt_logprobs=True))

    world.play(scene, temperature=0.5)


def test_W7_prompts_of_two_versions_share_no_cached_prefix(world: World) -> None:
    async def scene(world: World) -> None:
        await world.engine.generate(request())
        await world.engine.generate(request())
        await world.engine.update_weights(1, world.folder)
        await world.engine.generate(request())

    world.play(scene)
    before, again, after = (body["cache_salt"] for body in world.stub.bodies(TOKENS))
    assert before == again != after


def test_a_server_without_the_token_endpoint_completes_and_versions_are_those_confirmed_before(world: World) -> None:
    world.stub.always[TOKENS] = status(403, "Scale-out endpoints are disabled")

    async def scene(world: World) -> list[Generation]:
        await world.engine.update_weights(1, world.folder)
        running = asyncio.create_task(world.engine.generate(request(prompt_logprobs=True)))
        await asyncio.sleep(4.5 * TOKEN_S)
        await world.engine.update_weights(2, world.folder)
        return [await running, await world.engine.generate(request())]

    first, second = world.play(scene)
    assert first.token_ids == list(range(10))
    assert (first.versions, second.versions) == ([1] * 10, [2] * 10)
    assert first.prompt_logprobs == [-0.5, -0.5]
    body = world.stub.bodies(COMPLETIONS)[0]
    assert (body["prompt"], body["logprobs"], body["return_token_ids"]) == (PROMPT, 0, True)
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)


def test_a_completion_can_be_interrupted(world: World) -> None:
    world.stub.always[TOKENS] = status(404)

    async def scene(world: World) -> Generation:
        running = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        await asyncio.sleep(3.5 * TOKEN_S)
        await world.engine.interrupt("1.0.0.0")
        return await running

    generation = world.play(scene)
    assert (generation.finish_reason, generation.token_ids) == ("interrupted", [0, 1, 2])


def test_a_completion_of_a_server_that_was_restarted_meanwhile_is_refused(world: World) -> None:
    world.stub.always[TOKENS] = status(404)

    async def scene(world: World) -> None:
        await world.engine.update_weights(1, world.folder)
        world.stub.label = "default"
        with pytest.raises(EngineReplyError, match="serves version 0 after it had confirmed 1"):
            await world.engine.generate(request())

    world.play(scene)


def good(**changes: Any) -> dict[str, Any]:
    """A reply to any request, with changes in its only choice."""
    reply = reply_of("x", [4, 5], ["default", "1"], "stop")
    reply["choices"][0] |= changes
    return reply


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (good(weight_versions=None), "does not report the weight_versions"),
        (good(weight_versions=[]), "are not those of 2 tokens"),
        (good(weight_versions=[{"version": "1", "start": 1, "end": 2}]), "are not those of 2 tokens"),
        (good(weight_versions=[{"version": "1", "start": 0, "end": 3}]), "are not those of 2 tokens"),
        (good(weight_versions=[{"version": "mine", "start": 0, "end": 2}]), "weights named 'mine' are of no policy"),
        (good(weight_versions=[{"version": "-1", "start": 0, "end": 2}]), "weights named '-1'"),
        (good(weight_versions=[{"version": "9" * 30, "start": 0, "end": 2}]), "are of no policy version"),
        (good(token_ids=None), "no token_ids"),
        (good(token_ids=[4]), "1 token_ids and 2 logprobs"),
        (good(token_ids=[4, 6]), "the logprob at token 1 is of another token"),
        (good(token_ids=[4, -1]), "invalid value"),
        (good(logprobs=None), "2 token_ids and 0 logprobs"),
        (good(logprobs={"content": None}), "2 token_ids and 0 logprobs"),
        (good(logprobs={"token_logprobs": [-0.1, None]}), "token 1 has no logprob"),
        (good(logprobs={"content": [{"token_id": 4, "logprob": -9999.0}] * 2}, token_ids=[4, 4]), "has no logprob"),
        (good(finish_reason="error"), "it ends because of 'error'"),
        (good(finish_reason=None), "does not say why it ends"),
        (good() | {"choices": []}, "it has 0 choices"),
        (good() | {"choices": good()["choices"] * 2}, "it has 2 choices"),
        ({"error": {"message": "CUDA out of memory"}}, "missing field"),
    ],
)
def test_H8_a_reply_that_is_none_is_an_error_however_successful_it_looks(
    world: World, reply: dict[str, Any], message: str
) -> None:
    async def scene(world: World) -> Generation:
        world.stub.answer = lambda real: reply if "error" in reply else reply | {"request_id": real["request_id"]}
        with pytest.raises(EngineReplyError, match=rf"engine-0 gave request 1\.0\.0\.0 an answer .*{message}"):
            await world.engine.generate(request())
        world.stub.answer = lambda real: real
        return await world.engine.generate(request())

    assert len(world.play(scene).token_ids) == 10


@pytest.mark.parametrize(
    ("prompt_logprobs", "message"),
    [
        (None, "no prompt_logprobs"),
        ([None, {"2": {"logprob": -0.5}}], "prompt_logprobs of 2 tokens; the prompt has 3"),
        ([None, {"2": {"logprob": -0.5}}, {"7": {"logprob": -0.5}}], "token 2 of the prompt has no logprob"),
        ([None, None, {"3": {"logprob": -0.5}}], "token 1 of the prompt has no logprob"),
    ],
)
def test_prompt_logprobs_that_do_not_fit_the_prompt_are_refused(
    world: World, prompt_logprobs: list[Any] | None, message: str
) -> None:
    async def scene(world: World) -> None:
        world.stub.answer = lambda real: real | {"prompt_logprobs": prompt_logprobs}
        with pytest.raises(EngineReplyError, match=message):
            await world.engine.generate(request(prompt_logprobs=True))

    world.play(scene)


def test_the_reply_of_another_request_is_refused(world: World) -> None:
    async def scene(world: World) -> None:
        world.stub.answer = lambda real: real | {"request_id": "generate-tokens-other"}
        with pytest.raises(EngineReplyError, match="it answers request 'generate-tokens-other', not 'generate-tokens-"):
            await world.engine.generate(request())

    world.play(scene)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (raw(b'{"request_id": "gen'), EngineReplyError, "an answer that is refused: EOF while parsing"),
        (raw(b"[]"), EngineReplyError, "an answer that is refused: invalid"),
        (raw(b"\xff\xfe"), EngineReplyError, "an answer that is refused"),
        (raw(b""), EngineReplyError, "an answer that is refused: EOF"),
        (half, EngineReplyError, "engine-0 broke off its answer to POST"),
        (stall, EngineReplyError, r"began to answer request 1\.0\.0\.0 and did not finish within 60 s"),
        (hang_up, EngineError, "engine-0 hung up on POST"),
        (
            status(500, "CUDA out of memory"),
            EngineStatusError,
            "engine-0 answered POST .* with 500: CUDA out of memory",
        ),
        (status(400, "too long"), EngineStatusError, "with 400: too long"),
        (silence, EngineTimeoutError, r"did not answer request 1\.0\.0\.0 within 500 s \(request_timeout_s\)"),
    ],
    ids=["truncated", "shape", "binary", "empty", "broken off", "stalled", "hung up", "500", "400", "slow"],
)
def test_every_fault_of_a_reply_is_an_error_of_its_kind_and_the_engine_goes_on(
    world: World, fault: Fault, kind: type[EngineError], message: str
) -> None:
    async def scene(world: World) -> Generation:
        world.stub.faults[TOKENS] = [fault]
        with pytest.raises(kind, match=message) as caught:
            await world.engine.generate(request())
        assert type(caught.value) is kind
        return await world.engine.generate(request())

    assert len(world.play(scene, request_timeout_s=500.0).token_ids) == 10


def test_replies_that_stall_keep_others_waiting_only_for_a_while(world: World) -> None:
    async def scene(world: World) -> list[Generation | BaseException]:
        world.stub.faults[TOKENS] = [stall] * 5
        names = [f"{index}.0.0.0" for index in range(10)]
        return await asyncio.gather(*(world.engine.generate(request(name)) for name in names), return_exceptions=True)

    outcomes = world.play(scene)
    assert [type(outcome) for outcome in outcomes] == [EngineReplyError] * 5 + [Generation] * 5


def test_in_a_storm_of_errors_every_request_fails_and_none_hangs(world: World) -> None:
    async def scene(world: World) -> list[Generation | BaseException]:
        world.stub.faults[TOKENS] = [status(503)] * 60
        names = [f"{index}.0.0.0" for index in range(64)]
        return await asyncio.gather(*(world.engine.generate(request(name)) for name in names), return_exceptions=True)

    outcomes = world.play(scene)
    assert sum(isinstance(outcome, EngineStatusError) and outcome.status == 503 for outcome in outcomes) == 60
    assert sum(isinstance(outcome, Generation) for outcome in outcomes) == 4


def test_a_request_that_cannot_even_be_read_back_leaves_nobody_waiting(world: World) -> None:
    async def scene(world: World) -> None:
        with pytest.raises(OverflowError):
            await world.engine.generate(GenerateRequest("1.0.0.0", [1, -1], 10, True))

    world.play(scene)


def test_stopping_fails_what_is_in_flight(world: World) -> None:
    async def scene(world: World) -> None:
        running = asyncio.create_task(world.engine.generate(request(tokens=10**6)))
        await until(lambda: bool(world.stub.running))
        await world.engine.stop()
        with pytest.raises(EngineError, match="engine-0 was stopped"):
            await running
        await until(lambda: not world.stub.running)

    world.play(scene)
