"""Memory for keys and values is bounded, and running out of it costs nothing but time."""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.engines import GenerateRequest, TransformersEngine
from forebay.engines.local import sampling
from forebay.engines.local.batch import DecodeBatch
from forebay.engines.local.cache_budget import CacheBudget
from forebay.engines.local.kv_cache import RowCache
from forebay.engines.local.rows import Row
from forebay.types import SampleParams

CONTEXT = 60
LEAST_ROWS = 4
"""That the cache has on a CPU."""


@pytest.fixture(scope="module")
def model(make_model: Any) -> Any:
    return make_model("llama")


def request(number: int) -> GenerateRequest:
    """One of ten requests: short and long prompts, some shared; greedy and sampled."""
    return GenerateRequest(
        request_id=str(number),
        input_ids=np.arange((1, 5, 17, 17, 33)[number % 5], dtype=np.int32) % 50,
        params=SampleParams(max_tokens=34, temperature=(0.0, 1.0)[number % 2]),
        max_tokens=(34, 3, 20)[number % 3],
        seed=number,
    )


def new_batch(model: Any, cache_tokens: Any = "auto") -> DecodeBatch:
    budget = CacheBudget(cache_tokens)
    return DecodeBatch(model, max_context_tokens=CONTEXT, prefill_tokens=100, budget=budget)


def test_a_reading_at_the_trainer_s_peak_fails_no_request(model):
    batch = new_batch(model)
    batch.budget._measured = 1
    ended, began = run(batch, rows := [Row(request(number)) for number in range(4)], 1)
    assert began == rows
    assert {completion.finish_reason for completion in ended.values()} == {"length"}


class Memory:
    """Runs out at chosen uses of it: a forward, a draw, a cache that is made or grows."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Any, shortages: set[int]) -> None:
        self.num_uses = self.num_shortages = 0
        self._shortages = shortages
        places = (model.base_model, "forward"), (sampling, "draw"), (RowCache, "resize")
        for owner, name in places:
            patch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_uses += 1
            if self.num_uses in self._shortages:
                self.num_shortages += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return function(*args, **kwargs)

        return call


def run(batch: DecodeBatch, queue: list[Row], bound: int) -> tuple[dict[Row, Any], list[Row]]:
    """All completions, and the rows in the order in which they first ran."""
    ended: dict[Row, Any] = {}
    began: dict[Row, None] = {}
    while queue or batch.size:
        fitting, impossible = batch.select(queue)
        assert not impossible
        assert fitting or batch.size
        news = dict(batch.admit(fitting) if fitting else batch.step(3))
        began |= dict.fromkeys(fitting)
        given_up = [row for row, completion in news.items() if completion is None]
        ended |= {row: completion for row, completion in news.items() if completion is not None}
        queue = sorted(given_up, key=lambda row: row.turn) + queue[len(fitting) :]
        assert batch.size <= 1 or batch._cache.num_tokens <= bound
    return ended, list(began)


@cache
def alone(model: Any, number: int) -> Any:
    batch = new_batch(model)
    ended, _ = run(batch, [Row(request(number))], 10**9)
    return next(iter(ended.values()))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.sampled_from([LEAST_ROWS * 64, 5 * 64, 500, 10**6]),
    st.sets(st.integers(1, 60), max_size=5),
)
def test_whatever_memory_there_is_each_request_gets_its_tokens(model, numbers, bound, shortages):
    rows = [Row(request(number)) for number in numbers]
    batch = new_batch(model, bound)
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.object(batch.budget, "fell_short", wraps=batch.budget.fell_short) as told,
    ):
        memory = Memory(patch, model, shortages)
        ended, began = run(batch, list(rows), bound)
    assert began == rows, "first come, first served"
    assert set(ended) == set(rows)
    for row, completion in ended.items():
        expected = alone(model, int(row.request.request_id))
        count = len(completion.response_ids)
        assert completion.response_ids.tolist() == expected.response_ids[:count].tolist()
        np.testing.assert_allclose(completion.logprobs, expected.logprobs[:count], atol=1e-4)
        assert completion.model_steps.tolist() == [3] * count
        if completion.finish_reason == "error":
            # The only one that ran: there was nothing to give up.
            assert completion.error_msg.startswith("out of memory with one request; set cache_tokens")
            assert memory.num_shortages
        else:
            assert (count, completion.finish_reason) == (len(expected.response_ids), expected.finish_reason)
    assert told.call_count == memory.num_shortages
    batch.release()
    assert batch._cache.num_tokens == 0
    assert all(layer.keys is None for layer in batch._cache.layers)


def test_a_request_that_fits_as_it_is_may_run_though_graphs_are_wider(model):
    batch = new_batch(model, 33 + 20)
    batch._graphs._recorder, batch._min_rows = pytest.fail, 1
    whole, longer = Row(request(14)), Row(request(9))
    assert (batch.cache_need(whole), batch.cache_need(longer)) == (53, 60)
    assert batch.select([whole, longer]) == ([whole], [longer])


def test_responses_that_outgrow_the_cache_wait_again_with_their_tokens(model):
    rows = [Row(request(0)) for _ in range(12)]
    batch = new_batch(model, 12 * 32)
    first, _ = batch.select(rows)
    assert len(first) == 8, "with room for all that these may make"
    batch = new_batch(model, 12 * 32)
    batch.admit(rows)
    while not (given_up := dict(batch.step(0))):
        pass
    assert set(given_up.values()) == {None}
    # At column 33 rows of 48 columns, eight of them, fill what twelve of 32 did.
    assert given_up.keys() == set(rows[8:])
    assert {len(row.made) for row in given_up} == {32}


async def test_requests_wait_for_room_in_turn(llama, make_request):
    engine = TransformersEngine(llama, cache_tokens=6 * 64)
    long = [make_request([*range(40)], f"long{i}", max_tokens=20, temperature=0.0) for i in range(5)]
    short = [make_request([7, 8], f"short{i}", max_tokens=4, temperature=0.0) for i in range(5)]
    unbounded = TransformersEngine(llama)
    expected = [await unbounded.generate(one) for one in (long[0], short[0])]
    order: list[str] = []
    most_running = 0

    async def ask(one: GenerateRequest) -> list[int]:
        nonlocal most_running
        completion = await engine.generate(one)
        health = await engine.health()
        most_running = max(most_running, health.num_running + 1)
        order.append(one.request_id)
        return completion.response_ids.tolist()

    tasks = [asyncio.create_task(ask(one)) for one in (*long, *short)]
    while not (health := await engine.health()).num_running:
        await asyncio.sleep(0)
    assert (health.num_running, health.num_waiting) == (6, 4)
    answers = await asyncio.gather(*tasks)
    assert answers == [expected[0].response_ids.tolist()] * 5 + [expected[1].response_ids.tolist()] * 5
    assert most_running == 6
    # A short one beside the long ones ends first, the others after them in turn.
    assert order[0] == "short0"
    assert [name for name in order if name.startswith("short")] == [one.request_id for one in short]
    await engine.close()
    await unbounded.close()


async def test_a_request_that_can_never_fit_is_one_error(llama, make_request):
    engine = TransformersEngine(llama, cache_tokens=LEAST_ROWS * 64)
    asked = [make_request([1], "a"), make_request([1], "huge", max_tokens=64), make_request([2], "b")]
    completions = await asyncio.gather(*(engine.generate(one) for one in asked))
    assert [completion.finish_reason for completion in completions] == ["length", "error", "length"]
    assert completions[1].error_msg == (
        "request 'huge' may need a key/value cache of 260 tokens, and it takes 256 at most; raise "
        "engine.arguments.cache_tokens, or let responses be shorter"
    )
    await engine.close()


async def test_running_out_of_memory_is_a_warning_and_the_tokens_stay(llama, make_request, monkeypatch, caplog):
    asked = [make_request([1, 2, i], str(i), seed=i, max_tokens=20) for i in range(6)]
    engine = TransformersEngine(llama)
    expected = [await engine.generate(one) for one in asked]
    engine._batch.release()
    Memory(monkeypatch, llama, {12})
    with caplog.at_level(logging.WARNING):
        completions = await asyncio.gather(*(engine.generate(one) for one in asked))
    for one, other in zip(completions, expected, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
    assert "its 6 requests keep their tokens and wait" in caplog.text
    assert "set cache_tokens, prefill_tokens or max_batch in [engine.arguments] lower" in caplog.text
    health = await engine.health()
    assert (health.ok, health.num_running, health.num_waiting) == (True, 0, 0)
    await engine.close()


async def test_an_abort_gives_back_the_tokens_of_a_request_that_waits_again(llama, make_request, monkeypatch):
    engine = TransformersEngine(llama)
    asked = [make_request([1, 2, 3], str(i), max_tokens=60, temperature=0.0) for i in range(2)]
    whole = await engine.generate(asked[0])
    engine._batch.release()
    memory = Memory(monkeypatch, llama, {30})
    tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
    while not memory.num_shortages:
        await asyncio.sleep(0)
    await engine.pause()
    for task in tasks:
        completion = await task
        assert completion.finish_reason == "abort"
        count = len(completion.response_ids)
        assert count >= 10
        assert completion.response_ids.tolist() == whole.response_ids[:count].tolist()
    assert engine._batch._cache.num_tokens == 0
    await engine.close()


def test_a_share_of_a_gpu_is_measured_when_nothing_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    budget = CacheBudget()
    budget.measure(torch.device("cuda"), held_tokens=30, bytes_per_token=10)
    assert budget.tokens == 60
    budget.fell_short(40)
    assert budget.tokens == 20
    assert budget.most_tokens > 10**9, "how much was free just then forbids no request"
    for _ in range(8):
        budget.recover()
    assert budget.tokens == 60


def test_a_pass_that_fails_keeps_the_rows_that_were_given_up_before_it(model, monkeypatch):
    def broken() -> None:
        raise ValueError("a model's own fault")

    batch = new_batch(model, 10**6)
    rows = [Row(request(number)) for number in (3, 4)]
    batch.admit(rows)
    batch.budget.fell_short(2)
    monkeypatch.setattr(batch, "_draw", broken)
    with pytest.raises(ValueError, match="own fault"):
        batch.step(0)
    ended = dict(batch.fail("a forward pass failed"))
    assert ended.keys() == set(rows)
    assert ended[rows[1]] is None
    assert ended[rows[0]].finish_reason == "error"
