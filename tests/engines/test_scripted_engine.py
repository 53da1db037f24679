from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import numpy as np
import pytest

from forebay.engines import Completion
from forebay.testing import ScriptedEngine


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0].when())
        super()._run_once()


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    loop = VirtualClock()
    yield loop
    loop.close()


def test_answers_by_function_and_by_prompt(clock, make_request):
    by_function = ScriptedEngine(lambda request: [int(request.input_ids[0]) + 1, 9])
    completion = clock.run_until_complete(by_function.generate(make_request([4])))
    assert (completion.response_ids.tolist(), completion.finish_reason) == ([5, 9], "stop")
    assert completion.logprobs.tolist() == [-1.0, -1.0]
    by_prompt = ScriptedEngine({(4,): [5, 6, 7], (4, 4): Completion(finish_reason="tool_calls")})
    answers = [clock.run_until_complete(by_prompt.generate(make_request(ids))) for ids in ([4], [4, 5], [4, 4], [8])]
    assert [answer.response_ids.tolist() for answer in answers] == [[5, 6, 7], [6, 7], [], []]
    assert [answer.finish_reason for answer in answers] == ["stop", "stop", "tool_calls", "error"]
    assert "no answer for (8,)" in str(answers[-1].error_msg)


def test_cuts_at_the_budget_at_stop_ids_and_at_the_context(clock, make_request):
    engine = ScriptedEngine(lambda request: range(10), max_context_tokens=9, eos_token_ids=[5])

    def made(**changes):
        completion = clock.run_until_complete(engine.generate(make_request([1, 1], **changes)))
        return len(completion.response_ids), completion.finish_reason

    assert made(max_tokens=3) == (3, "length")
    assert made(max_tokens=50) == (6, "stop")
    assert made(max_tokens=50, stop_token_ids=(2,)) == (3, "stop")
    assert made(max_tokens=6) == (6, "stop")
    engine = ScriptedEngine(lambda request: range(10), max_context_tokens=9)
    assert made(max_tokens=50) == (7, "length")
    for ids in ([], [1] * 9):
        with pytest.raises(ValueError, match=r"no input tokens|the context of 9"):
            clock.run_until_complete(engine.generate(make_request(ids)))


def test_errors_returned_or_raised_are_error_completions(clock, make_request):
    def script(request):
        if request.request_id == "raised":
            raise RuntimeError("out of memory")
        return ValueError("returned")

    engine = ScriptedEngine(script)
    for name, message in (("raised", "RuntimeError: out of memory"), ("other", "ValueError: returned")):
        completion = clock.run_until_complete(engine.generate(make_request([1], name)))
        assert (completion.finish_reason, completion.error_msg) == ("error", message)


def test_takes_the_time_it_is_told_and_one_place_at_a_time(clock, make_request):
    engine = ScriptedEngine(
        lambda request: range(4),
        request_latency_s=lambda request: float(request.seed),
        token_latency_s=0.5,
        max_running=1,
    )

    async def ended_s(name: str, seed: int) -> float:
        await engine.generate(make_request([1], name, seed=seed))
        return clock.time()

    async def both() -> list[float]:
        return await asyncio.gather(ended_s("a", 1), ended_s("b", 10))

    assert clock.run_until_complete(both()) == [3.0, 15.0]
    assert [request.request_id for request in engine.requests] == ["a", "b"]


def test_abort_gives_the_tokens_whose_time_has_come(clock, make_request):
    engine = ScriptedEngine(lambda request: range(100), token_latency_s=0.1, max_running=2)

    async def run() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(make_request([1], name, max_tokens=100))) for name in "abc"]
        await asyncio.sleep(0.3)
        await engine.abort(["a", "unknown"])
        health = await engine.health()
        assert (health.num_running, health.num_waiting) == (2, 0)
        await asyncio.sleep(0.45)
        await engine.pause()
        return [*await asyncio.gather(*tasks), await engine.generate(make_request([1]))]

    completions = clock.run_until_complete(run())
    assert [len(completion.response_ids) for completion in completions] == [3, 7, 4, 0]
    assert {completion.finish_reason for completion in completions} == {"abort"}


def test_tokens_carry_the_step_of_the_weights_at_their_time(clock, make_request):
    engine = ScriptedEngine(lambda request: range(5), token_latency_s=1.0, model_step=2)

    async def run() -> Completion:
        task = asyncio.create_task(engine.generate(make_request([1])))
        await asyncio.sleep(2.5)
        await engine.load_weights([], 3)
        return await task

    assert clock.run_until_complete(run()).model_steps.tolist() == [2, 2, 3, 3, 3]
    assert engine.model_step == 3


def test_a_hanging_request_can_be_cancelled_and_frees_its_place(clock, make_request):
    hang = {"a": math.inf}
    engine = ScriptedEngine(
        lambda request: [1], request_latency_s=lambda r: hang.get(r.request_id, 0.0), max_running=1
    )

    async def run() -> Completion:
        hanging = asyncio.create_task(engine.generate(make_request([1], "a")))
        waiting = asyncio.create_task(engine.generate(make_request([1], "b")))
        cancelled = asyncio.create_task(engine.generate(make_request([1], "c")))
        await asyncio.sleep(100)
        assert not waiting.done()
        cancelled.cancel()
        hanging.cancel()
        return await waiting

    assert clock.run_until_complete(run()).response_ids.tolist() == [1]
    health = clock.run_until_complete(engine.health())
    assert (health.num_running, health.num_waiting) == (0, 0)


def test_closing_ends_everything(clock, make_request):
    engine = ScriptedEngine(lambda request: [1], request_latency_s=math.inf)

    async def run() -> list[Completion]:
        task = asyncio.create_task(engine.generate(make_request([1])))
        await asyncio.sleep(1)
        await engine.close()
        return [await task, await engine.generate(make_request([1]))]

    assert [completion.finish_reason for completion in clock.run_until_complete(run())] == ["abort", "error"]


def test_a_completion_of_ones_own_keeps_its_logprobs(clock, make_request):
    answer = Completion(
        response_ids=np.array([3, 4], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        model_steps=np.array([1, 2], np.int32),
        finish_reason="tool_calls",
    )
    completion = clock.run_until_complete(ScriptedEngine(lambda request: answer).generate(make_request([1])))
    assert completion.logprobs.tolist() == [-0.5, -0.25]
    assert completion.model_steps.tolist() == [1, 2]
    assert completion.finish_reason == "tool_calls"
