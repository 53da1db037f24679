"""Any order of joining, stepping and leaving gives every request the tokens it would get alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engines import GenerateRequest
from forebay.engines.local.batch import DecodeBatch
from forebay.engines.local.rows import Ended, Row
from forebay.types import SampleParams

CONTEXT = 60


@pytest.fixture(scope="module")
def model(make_model: Any) -> Any:
    return make_model("llama")


def new_batch(model: Any) -> DecodeBatch:
    return DecodeBatch(model, max_context_tokens=CONTEXT, prefill_tokens=100, eos_token_ids=[5, 11])


def request(number: int) -> GenerateRequest:
    """One of twelve requests: lengths from one token to the context, few prompts, all kinds of sampling."""
    lengths = (1, 2, 9, 30, 30, 55)
    return GenerateRequest(
        request_id=str(number),
        input_ids=np.arange(lengths[number % 6], dtype=np.int32) % 50,
        params=SampleParams(
            max_tokens=40,
            temperature=(1.0, 0.0, 1.5)[number % 3],
            top_k=(0, 0, 3, 0)[number % 4],
            top_p=(1.0, 0.8)[number % 2],
            stop_token_ids=((), (7, 8))[number % 2],
        ),
        max_tokens=1 + 5 * (number % 7),
        seed=number,
    )


def finish(batch: DecodeBatch) -> list[Ended]:
    ended = []
    while batch.size:
        ended += batch.step(0)
    return ended


# What a test does next: let requests join, step, or abort the n-th oldest that runs.
ACTIONS = st.one_of(st.lists(st.integers(0, 11), min_size=1, max_size=6), st.just("step"), st.integers(0, 9))


@given(st.lists(ACTIONS, max_size=25))
def test_every_row_ends_once_with_its_own_tokens(model, actions):
    batch = new_batch(model)
    joined: list[Row] = []
    running: list[Row] = []
    ended: list[Ended] = []
    aborted: set[Row] = set()
    for action in actions:
        if isinstance(action, list):
            rows = [Row(request(number)) for number in action]
            batch.admit(rows)
            joined += rows
            running += rows
        elif action == "step" and running:
            ended += batch.step(0)
        elif isinstance(action, int) and action < len(running):
            aborted.add(running[action])
            ended += batch.abort([running[action]])
        gone = {row for row, _ in ended}
        running = [row for row in joined if row not in gone]
        assert batch.size == len(running)
    ended += finish(batch)
    assert {row for row, _ in ended} == set(joined)
    assert len(ended) == len(joined)
    for row, completion in ended:
        alone = expected(model, int(row.request.request_id))
        count = len(completion.response_ids)
        assert completion.response_ids.tolist() == alone.response_ids[:count].tolist()
        np.testing.assert_allclose(completion.logprobs, alone.logprobs[:count], atol=1e-4)
        if row in aborted:
            assert completion.finish_reason == "abort"
        else:
            assert (count, completion.finish_reason) == (len(alone.response_ids), alone.finish_reason)


@cache
def expected(model: Any, number: int) -> Any:
    batch = new_batch(model)
    batch.admit([Row(request(number))])
    ((_, completion),) = finish(batch)
    return completion


def test_the_twelve_requests_end_in_all_ways(model):
    reasons = {expected(model, number).finish_reason for number in range(12)}
    assert reasons == {"stop", "length"}
    longest = expected(model, 5)
    assert len(longest.response_ids) <= CONTEXT - 55


def test_memory_follows_what_the_rows_need_and_is_given_back(model):
    batch = new_batch(model)
    batch.admit([Row(request(2))])
    assert batch._cache.num_columns == 16
    assert batch._cache.num_rows == 4
    finish(batch)
    assert batch._cache.num_columns <= 48
    batch.release()
    assert (batch._cache.num_rows, batch._cache.num_columns) == (0, 0)
    assert all(layer.keys is None for layer in batch._cache.layers)
    batch.admit([Row(request(2))])
    ((_, completion),) = finish(batch)
    assert completion.response_ids.tolist() == expected(model, 2).response_ids.tolist()
