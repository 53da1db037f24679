"""The contract of a replay store as tests that a store's author inherits.

::

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self):
            store = MyStorage(...)
            yield store
            store.close()

The contract in words is `forebay.replay.stores.contract`. Most of it is held by comparing with `NaiveStorage`,
over operations and queries in any order; the other tests hold what a comparison cannot see. They need pytest
and nothing else, and run the coroutines themselves. Payloads are short texts and numbers.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest

from forebay.replay.stores.contract import StorageBackend
from forebay.replay.stores.naive import NaiveStorage
from forebay.testing.store_rows import EVERYTHING, ORDERS, draw_operation, draw_query, make_row, put_all

Suite = TypeVar("Suite", bound=type)


def _with_event_loop(suite: Suite) -> Suite:
    """Make every coroutine of the class a function that runs it: authors need no plug-in of pytest."""
    for name, test in list(vars(suite).items()):
        if inspect.iscoroutinefunction(test):
            setattr(suite, name, _as_function(test))
    return suite


def _as_function(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@_with_event_loop
class StorageConformance:
    """The tests of a store; a subclass overrides the fixture `storage` with a new, empty store.

    >>> class TestMyStorage(StorageConformance):
    ...     @pytest.fixture
    ...     def storage(self):
    ...         return MyStorage()
    """

    @pytest.fixture
    def storage(self) -> StorageBackend:
        """A new, empty store."""
        raise NotImplementedError("override the fixture `storage`")

    async def test_what_is_returned_is_a_copy(self, storage: StorageBackend) -> None:
        given_row = make_row("a", tags={"x": 1})
        uid = await storage.put(given_row)
        given_row.tags["x"] = 2
        given_row.status = "failed"
        (row,) = await storage.get({})
        row.tags["x"] = 3
        row.priority = 9.0
        (again,) = await storage.get({"uid": uid})
        assert (again.tags, again.priority, again.status) == ({"x": 1}, 1.0, "completed")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"task_name": "a\0"},
            {"task_name": "\ud800"},
            {"task_name": 7},
            {"status": "\0"},
            {"staleness": 2**63},
            {"oldest_model_step": -(2**70)},
        ],
    )
    async def test_what_some_store_could_not_hold_is_refused(
        self, storage: StorageBackend, wrong: dict[str, Any]
    ) -> None:
        (name,) = wrong
        row = replace(make_row("x"), **wrong)
        with pytest.raises(ValueError, match=f"^{name} must be"):
            await storage.put(row)
        uid = await storage.put(make_row("kept"))
        with pytest.raises(ValueError, match=f"^{name} must be"):
            await storage.update([replace(make_row("y"), uid=uid), replace(row, uid=uid)])
        assert [row.item for row in await storage.get({})] == ["kept"]

    async def test_takers_at_the_same_time_get_each_row_once(self, storage: StorageBackend) -> None:
        await asyncio.gather(*(storage.put(make_row(number)) for number in range(30)))
        batches = await asyncio.gather(
            *(storage.take_first(4, {"status": "completed"}, train_step=1) for _ in range(4)),
            *(storage.take_drawn(4, {"status": "completed"}, lambda: 0.5, train_step=1) for _ in range(3)),
            storage.take(range(28), query={"status": "completed"}),
            storage.take(range(28), query={"status": "completed"}),
        )
        taken = [row.item for batch in batches for row in batch]
        taken += [row.item for row in await storage.take_first(99, {})]
        assert sorted(taken) == list(range(30))
        assert len(storage) == 0

    async def test_a_state_that_contradicts_itself_changes_nothing(self, storage: StorageBackend) -> None:
        await storage.put(make_row("kept"))
        other = NaiveStorage()
        await put_all(other, make_row("a"), make_row("b"))
        state = other.state_dict()
        for wrong in ({"version": 99}, {"items": state["items"] * 2}, {"next_uid": 1}, {"next_timestamp_id": 0}):
            with pytest.raises(ValueError, match=r"version|twice"):
                storage.load_state_dict({**state, **wrong})
            assert [row.item for row in await storage.get({})] == ["kept"]

    async def test_wrong_queries_are_errors(self, storage: StorageBackend) -> None:
        wrong: list[Any] = ["completed", {"item": 1}, {"uid": {"$like": 1}}, {"uid": {"$between": [2, 1]}}]
        for query in wrong:
            for ask in (storage.get, storage.count):
                with pytest.raises(ValueError, match=r"query|field|operator|between"):
                    await ask(query)
            with pytest.raises(ValueError, match=r"query|field|operator|between"):
                await storage.take([1], query=query)

    @pytest.mark.parametrize("seed", range(4))
    async def test_operations_in_any_order_do_what_they_do_to_the_reference(
        self, storage: StorageBackend, seed: int
    ) -> None:
        """Puts, takes, draws, updates, deletions, evictions, ages and states, against `NaiveStorage`."""
        reference, draw = NaiveStorage(), Random(seed)
        for number in range(60):
            operation = draw_operation(draw, number)
            assert await operation(storage) == await operation(reference), f"operation {number}"
            order, limit = draw.choice(ORDERS), draw.choice([None, 0, 2, 99])
            for query in (EVERYTHING, *(draw_query(draw) for _ in range(4))):
                rows = await storage.get(query, order=order, limit=limit)
                assert rows == await reference.get(query, order=order, limit=limit), f"operation {number}, {query}"
                assert await storage.count(query) == await reference.count(query), f"operation {number}, {query}"
            assert len(storage) == len(reference)
            if number % 20 == 19:
                # Each to the other: ids never go back, and what comes next is the same again.
                states = reference.state_dict(), storage.state_dict()
                storage.load_state_dict(states[0])
                reference.load_state_dict(states[1])
        assert storage.num_evicted == reference.num_evicted
