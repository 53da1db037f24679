"""Requests coming, going and failing while the engine runs."""

from __future__ import annotations

import asyncio
import string
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from forebay.engines import Completion, GenerateRequest, TransformersEngine
from forebay.models.tiny import character_tokenizer

T = TypeVar("T")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Gate:
    """Holds the engine before each decode forward until a test lets it on."""

    def __init__(self, model: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._allowed = threading.Semaphore(0)
        self._arrived = asyncio.Semaphore(0)
        self.batch_sizes: list[int] = []
        self._hook = model.register_forward_pre_hook(self._hold, with_kwargs=True)

    def _hold(self, model: Any, args: Any, kwargs: Any) -> None:
        self.batch_sizes.append(len(kwargs["input_ids"]))
        self._loop.call_soon_threadsafe(self._arrived.release)
        self._allowed.acquire()

    async def reached(self) -> None:
        """Wait until a forward stands at the gate."""
        await self._arrived.acquire()

    async def let(self, count: int) -> None:
        """Let the forward at the gate and `count - 1` more pass, and wait for the next to arrive."""
        for _ in range(count):
            self._allowed.release()
            await self.reached()

    def open(self) -> None:
        self._hook.remove()
        self._allowed.release()


@pytest.fixture
async def engine(llama: Any) -> Any:
    engine = TransformersEngine(llama, max_batch=4)
    yield engine
    await engine.close()


def start(engine: TransformersEngine, *requests: GenerateRequest) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate(request)) for request in requests]


async def begun(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has run up to its first wait, so that the engine knows of it."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    return task


async def test_abort_gives_back_the_tokens_made_so_far(engine, llama, make_request):
    whole = await engine.generate(make_request(PROMPT, seed=5, max_tokens=20))
    gate = Gate(llama)
    first, second = start(engine, make_request(PROMPT, "a", seed=5, max_tokens=20), make_request([7], "b"))
    await gate.reached()
    await gate.let(5)
    aborting = await begun(engine.abort(["a", "unknown"]))
    await gate.let(1)
    await aborting
    assert first.done()
    gate.open()
    partial = await first
    assert partial.finish_reason == "abort"
    assert partial.response_ids.tolist() == whole.response_ids[:6].tolist()
    assert len(partial.logprobs) == len(partial.model_steps) == 6
    assert (await second).finish_reason == "length"


async def test_abort_and_cancel_reach_requests_that_wait(llama, make_request):
    engine = TransformersEngine(llama, max_batch=1)
    gate = Gate(llama)
    running, aborted, cancelled, last = start(engine, *(make_request(PROMPT, name, max_tokens=3) for name in "abcd"))
    await gate.reached()
    await engine.abort(["b"])
    cancelled.cancel()
    assert (await aborted).finish_reason == "abort"
    assert len((await aborted).response_ids) == 0
    health = await engine.health()
    assert (health.num_running, health.num_waiting) == (1, 1)
    gate.open()
    assert [len((await task).response_ids) for task in (running, last)] == [3, 3]
    assert cancelled.cancelled()
    await engine.close()


async def test_cancelling_a_running_request_frees_its_place(llama, make_request):
    engine = TransformersEngine(llama, max_batch=1)
    gate = Gate(llama)
    running, waiting = start(engine, make_request(PROMPT, "a", max_tokens=100), make_request(PROMPT, "b"))
    await gate.reached()
    await gate.let(2)
    running.cancel()
    gate.open()
    assert (await waiting).finish_reason == "length"
    assert running.cancelled()
    assert (await engine.health()).num_running == 0
    await engine.close()


async def test_a_request_joins_what_runs_at_the_next_token(llama, make_request):
    engine = TransformersEngine(llama, max_batch=8)
    gate = Gate(llama)
    running = start(engine, *(make_request(PROMPT, str(i), max_tokens=100) for i in range(5)))
    await gate.reached()
    joining = await begun(engine.generate(make_request(PROMPT, "late", max_tokens=2)))
    await gate.let(3)
    assert gate.batch_sizes[:4] == [5, 6, 6, 5]
    assert joining.done()
    gate.open()
    await asyncio.gather(*running)
    await engine.close()


async def test_pause_ends_everything_and_holds_until_resume(llama, make_request):
    engine = TransformersEngine(llama, max_batch=2)
    gate = Gate(llama)
    tasks = start(engine, *(make_request(PROMPT, str(i), max_tokens=50) for i in range(3)))
    await gate.reached()
    await gate.let(3)
    pausing = await begun(engine.pause())
    gate.open()
    await pausing
    assert all(task.done() for task in tasks)
    completions = [await task for task in tasks]
    assert {completion.finish_reason for completion in completions} == {"abort"}
    assert [len(completion.response_ids) for completion in completions] == [4, 4, 0]
    turned_away = await engine.generate(make_request(PROMPT))
    assert (turned_away.finish_reason, len(turned_away.response_ids)) == ("abort", 0)
    await engine.resume()
    assert (await engine.generate(make_request(PROMPT))).finish_reason == "length"
    await engine.close()


async def test_new_weights_take_effect_between_two_tokens(engine, llama, make_request):
    whole = await engine.generate(make_request(PROMPT, seed=1, max_tokens=10))
    new = {name: parameter * 1.1 for name, parameter in llama.named_parameters()}
    gate = Gate(llama)
    (task,) = start(engine, make_request(PROMPT, seed=1, max_tokens=10))
    await gate.reached()
    await gate.let(3)
    loading = await begun(engine.load_weights(new.items(), 7))
    gate.open()
    await loading
    assert engine.model_step == 7
    completion = await task
    steps = completion.model_steps.tolist()
    assert steps == sorted(steps)
    made_before = steps.count(0)
    # The forward at the gate ran before the weights could change.
    assert 4 <= made_before < 10
    assert set(steps) == {0, 7}
    np.testing.assert_array_equal(completion.logprobs[:made_before], whole.logprobs[:made_before])
    assert completion.logprobs[made_before] != whole.logprobs[made_before]


async def test_weights_that_do_not_fit_leave_the_engine_as_it_was(engine, make_request):
    before = await engine.generate(make_request(PROMPT))
    with pytest.raises(ValueError, match="the model has no 'nonsense'"):
        await engine.load_weights([("nonsense", torch.zeros(1))], 3)
    after = await engine.generate(make_request(PROMPT))
    assert after.response_ids.tolist() == before.response_ids.tolist()
    assert after.model_steps.tolist() == [0] * len(after.model_steps)


async def test_end_tokens_and_stop_ids_end_a_response_and_stay_in_it(llama, make_request):
    engine = TransformersEngine(llama)
    whole = (await engine.generate(make_request(PROMPT, seed=2, max_tokens=30))).response_ids.tolist()
    stop_id = next(token for place, token in enumerate(whole) if place >= 5 and token not in whole[:place])
    expected = whole[: whole.index(stop_id) + 1]
    stopped, other = await asyncio.gather(
        engine.generate(make_request(PROMPT, "a", seed=2, max_tokens=30, stop_token_ids=(60, stop_id))),
        engine.generate(make_request(PROMPT, "b", seed=2, max_tokens=30)),
    )
    assert (stopped.response_ids.tolist(), stopped.finish_reason) == (expected, "stop")
    assert (other.response_ids.tolist(), other.finish_reason) == (whole, "length")
    await engine.close()
    llama.generation_config.eos_token_id = [59, stop_id]
    engine = TransformersEngine(llama)
    completion = await engine.generate(make_request(PROMPT, seed=2, max_tokens=30))
    assert (completion.response_ids.tolist(), completion.finish_reason) == (expected, "stop")
    await engine.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """58 characters and three special tokens: the tiny models' 61."""
    return character_tokenizer(string.ascii_letters + "012345")


async def test_a_stop_text_ends_a_response_and_stays_in_it(llama, tokenizer, make_request):
    engine = TransformersEngine(llama, tokenizer)
    whole = (await engine.generate(make_request(PROMPT, seed=3, max_tokens=30))).response_ids.tolist()
    text = "".join(tokenizer.decode([token]) for token in whole)
    stop = text[10:13]
    stopped, other = await asyncio.gather(
        engine.generate(make_request(PROMPT, "a", seed=3, max_tokens=30, stop=("zzzz", stop))),
        engine.generate(make_request(PROMPT, "b", seed=3, max_tokens=30)),
    )
    assert stopped.finish_reason == "stop"
    assert tokenizer.decode(stopped.response_ids) == text[: text.index(stop) + len(stop)]
    assert other.response_ids.tolist() == whole
    await engine.close()


async def test_a_stop_text_may_begin_in_an_earlier_part_of_the_rollout(llama, tokenizer, make_request):
    engine = TransformersEngine(llama, tokenizer)
    greedy = make_request(PROMPT, max_tokens=30, temperature=0.0)
    whole = (await engine.generate(greedy)).response_ids.tolist()
    stop = tokenizer.decode(whole[2:4])
    params = replace(greedy.params, stop=(stop,))
    continued = replace(greedy, input_ids=np.array(PROMPT + whole[:3], np.int32), params=params, max_tokens=27)
    completion = await engine.generate(continued)
    assert (completion.response_ids.tolist(), completion.finish_reason) == (whole[3:4], "stop")
    # The same tokens as a prompt: what stands in a prompt is no part of a stop text.
    prompt = replace(continued, params=replace(params, max_tokens=27))
    assert len((await engine.generate(prompt)).response_ids) > 1
    await engine.close()


async def test_a_failing_forward_fails_its_requests_and_no_other(engine, llama, make_request, monkeypatch):
    forward = llama.forward
    calls = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", failing)
    requests = [make_request(PROMPT, str(i), seed=i) for i in range(6)]
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    reasons = [completion.finish_reason for completion in completions]
    assert reasons == ["error"] * 4 + ["length"] * 2
    assert [len(completion.response_ids) for completion in completions] == [2] * 4 + [8] * 2
    assert completions[0].error_msg == "forward pass failed: RuntimeError: out of memory"
    assert completions[-1].error_msg is None
    health = await engine.health()
    assert (health.ok, health.num_running) == (True, 0)


async def test_a_failing_prefill_leaves_what_runs_alone(engine, llama, make_request, monkeypatch):
    gate = Gate(llama)
    (running,) = start(engine, make_request(PROMPT, "a"))
    await gate.reached()
    forward = llama.base_model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > 1:
            raise RuntimeError("no such kernel")
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama.base_model, "forward", failing)
    joining = await begun(engine.generate(make_request(PROMPT, "b")))
    gate.open()
    assert (await joining).error_msg == "forward pass failed: RuntimeError: no such kernel"
    assert (await running).finish_reason == "length"


async def test_weights_that_have_diverged_give_errors_until_good_ones_come(engine, llama, make_request):
    good = {name: parameter.clone() for name, parameter in llama.named_parameters()}
    long_prompt = [7] * 70
    requests = [make_request(long_prompt, "long", max_tokens=20), make_request(PROMPT, "short")]
    before = await asyncio.gather(*map(engine.generate, requests))
    bad = {name: torch.full_like(parameter, torch.nan) for name, parameter in good.items()}
    await engine.load_weights(bad.items(), 1)
    completions = await asyncio.gather(*(engine.generate(make_request(long_prompt, str(i))) for i in range(6)))
    assert {completion.finish_reason for completion in completions} == {"error"}
    assert "not finite" in str(completions[0].error_msg)
    await engine.load_weights(good.items(), 2)
    # In rows where the broken ones stood, one of them long, so that what is beside the short one is read.
    after = await asyncio.gather(*map(engine.generate, requests))
    for good_again, once in zip(after, before, strict=True):
        assert good_again.finish_reason == "length"
        np.testing.assert_array_equal(good_again.logprobs, once.logprobs)


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        ([], {}, "has no input tokens"),
        (list(range(50)), {}, "has 50 input tokens, which leaves no room in the context of 50"),
        (PROMPT, {"stop": ("x",)}, "stop texts .* built without a tokenizer"),
        ([3, 61], {}, "a model of 61 tokens has no 61"),
        ([3, -1, 4], {}, "a model of 61 tokens has no -1"),
    ],
)
async def test_what_can_never_run_is_refused(llama, make_request, ids, changes, message):
    engine = TransformersEngine(llama, max_context_tokens=50)
    with pytest.raises(ValueError, match=message):
        await engine.generate(make_request(ids, **changes))
    with pytest.raises(ValueError, match="may add 0 tokens"):
        await engine.generate(replace(make_request(PROMPT), max_tokens=0))
    await engine.close()


async def test_requests_submitted_together_start_together(llama, make_request):
    engine = TransformersEngine(llama, max_batch=64)
    sizes = []
    hook = llama.register_forward_pre_hook(
        lambda model, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    places = asyncio.Semaphore(64)

    async def rollout(name: str) -> Completion:
        async with places:
            return await engine.generate(make_request(PROMPT, name, max_tokens=3))

    async def group(name: int) -> list[Completion]:
        return await asyncio.gather(*(rollout(f"{name}-{i}") for i in range(5)))

    async with asyncio.TaskGroup() as tasks:
        for name in range(4):
            tasks.create_task(group(name))
    hook.remove()
    assert sizes == [20, 20, 20]
    await engine.close()


async def test_close_ends_what_runs_and_refuses_the_rest(llama, make_request):
    engine = TransformersEngine(llama)
    gate = Gate(llama)
    (task,) = start(engine, make_request(PROMPT, max_tokens=100))
    await gate.reached()
    closing = await begun(engine.close())
    gate.open()
    await closing
    assert (await task).finish_reason == "abort"
    assert (await engine.generate(make_request(PROMPT))).error_msg == "the engine is closed"
    assert not (await engine.health()).ok
    with pytest.raises(RuntimeError, match="the engine is closed"):
        await engine.load_weights([], 1)
    await engine.pause()
    await engine.close()


def test_an_event_loop_that_ends_early_does_not_break_the_next(llama, make_request):
    engine = TransformersEngine(llama)
    expected = asyncio.run(engine.generate(make_request(PROMPT, "a"))).response_ids.tolist()

    async def leave_early() -> None:
        gate = Gate(llama)
        tasks = start(engine, *(make_request(PROMPT, str(i), max_tokens=100) for i in range(3)))
        await gate.reached()
        gate.open()
        assert not any(task.done() for task in tasks)

    asyncio.run(leave_early())

    async def again() -> list[int]:
        completion = await engine.generate(make_request(PROMPT, "a"))
        assert (await engine.health()).num_running == 0
        await engine.close()
        return completion.response_ids.tolist()

    assert asyncio.run(again()) == expected
