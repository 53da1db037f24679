"""The contract of a replay store as tests that a store's author inherits.

::

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self):
            store = MyStorage(...)
            yield store
            store.close()

The contract in words is `forebay.replay.stores.contract`; each test holds one sentence of it. The tests need
pytest and nothing else; they run the coroutines themselves. Payloads are short texts and numbers.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

import pytest

from forebay.replay.stores.contract import StorageBackend, TagValue
from forebay.replay.stores.naive import NaiveStorage
from forebay.testing.store_rows import EVERYTHING, ORDERS, QUERIES, draw_operation, fill, make_row, put_all, uids

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

    # Ids and order

    async def test_put_gives_growing_ids_and_get_returns_arrival_order(self, storage: StorageBackend) -> None:
        ids = await put_all(storage, make_row("a"), make_row("b", task="code"), make_row("c"))
        assert ids == sorted(set(ids))
        rows = await storage.get({})
        assert uids(rows) == ids
        assert [row.item for row in rows] == ["a", "b", "c"]
        assert [row.timestamp_id for row in rows] == sorted(row.timestamp_id for row in rows)
        assert len(storage) == 3

    async def test_an_id_that_is_brought_along_is_kept_if_it_is_new(self, storage: StorageBackend) -> None:
        row = make_row("a")
        row.uid, row.timestamp_id = 7, 9
        assert await storage.put(row) == 7
        assert await storage.put(row) == 8
        assert await storage.put(make_row("b")) == 9
        assert [stored.timestamp_id for stored in await storage.get({})] == [9, 10, 11]

    async def test_ids_do_not_rewind_when_drained_or_loaded(self, storage: StorageBackend) -> None:
        older = storage.state_dict()
        ids = await put_all(storage, make_row(), make_row())
        await storage.take(ids)
        assert len(storage) == 0
        other = NaiveStorage()
        other.load_state_dict(storage.state_dict())
        assert await other.put(make_row()) > max(ids)
        storage.load_state_dict(older)
        assert len(storage) == 0
        newer = await put_all(other, make_row(), make_row())
        storage.load_state_dict(other.state_dict())
        assert await storage.put(make_row()) > max(newer)

    # Isolation

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

    async def test_rows_come_back_with_every_field(self, storage: StorageBackend) -> None:
        tags: dict[str, TagValue] = {
            "int": 2**63 - 1,
            "float": 0.1,
            "zero": 0.0,
            "true": True,
            "text\0\ud800": "'\0\ud800\U0010ffff",
        }
        row = make_row("a", "code '", "aborted", staleness=-3, step=0, tags=tags, priority=1e-300)
        await storage.put(row)
        (stored,) = await storage.get({"tags.int": 2**63 - 1, "tags.text\0\ud800": {"$gte": "'\0\ud800"}})
        assert (stored.task_name, stored.staleness, stored.oldest_model_step) == ("code '", -3, 0)
        assert (stored.priority, stored.train_step, stored.status_before) == (1e-300, None, None)
        assert stored.tags == tags
        assert list(map(type, stored.tags.values())) == list(map(type, tags.values()))
        assert await storage.count({"tags.int": {"$gte": 2.0**63}}) == 0

    # Age

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

    # Taking, deleting, updating

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

    # State

    async def test_a_state_moves_to_another_store_and_back(self, storage: StorageBackend) -> None:
        await storage.set_train_step("math", 6)
        ids = await put_all(
            storage, make_row("a", step=1), make_row("b", staleness=2, tags={"x": True}), make_row("c", priority=0.0)
        )
        await storage.take(ids[:1], train_step=6)
        other = NaiveStorage()
        other.load_state_dict(storage.state_dict())
        assert await other.get(EVERYTHING) == await storage.get(EVERYTHING)
        assert len(other) == len(storage) == 2
        assert await other.get_train_step("math") == 6
        (row,) = await other.get({"uid": ids[1]})
        row.priority = 5.0
        await other.update([row])
        assert (await storage.get({"uid": ids[1]}))[0].priority == 1.0
        storage.load_state_dict(other.state_dict())
        assert await other.get(EVERYTHING) == await storage.get(EVERYTHING)

    async def test_a_state_that_contradicts_itself_changes_nothing(self, storage: StorageBackend) -> None:
        await storage.put(make_row("kept"))
        other = NaiveStorage()
        await put_all(other, make_row("a"), make_row("b"))
        state = other.state_dict()
        for wrong in ({"version": 99}, {"items": state["items"] * 2}, {"next_uid": 1}, {"next_timestamp_id": 0}):
            with pytest.raises(ValueError, match=r"version|twice"):
                storage.load_state_dict({**state, **wrong})
            assert [row.item for row in await storage.get({})] == ["kept"]

    # Queries

    async def test_what_queries_match(self, storage: StorageBackend) -> None:
        await fill(storage)
        for query, expected in QUERIES:
            assert [row.item for row in await storage.get(query)] == expected, query
            assert await storage.count(query) == len(expected), query

    async def test_wrong_queries_are_errors(self, storage: StorageBackend) -> None:
        wrong: list[Any] = ["completed", {"item": 1}, {"uid": {"$like": 1}}, {"uid": {"$between": [2, 1]}}]
        for query in wrong:
            for ask in (storage.get, storage.count):
                with pytest.raises(ValueError, match=r"query|field|operator|between"):
                    await ask(query)
            with pytest.raises(ValueError, match=r"query|field|operator|between"):
                await storage.take([1], query=query)

    # Everything together

    @pytest.mark.parametrize("seed", range(4))
    async def test_operations_in_any_order_do_what_they_do_to_the_reference(
        self, storage: StorageBackend, seed: int
    ) -> None:
        """Puts, takes, draws, updates, deletions, evictions and ages, against `NaiveStorage`."""
        reference, draw = NaiveStorage(), Random(seed)
        for number in range(60):
            operation = draw_operation(draw, number)
            assert await operation(storage) == await operation(reference), f"operation {number}"
            order, limit = draw.choice(ORDERS), draw.choice([None, 0, 2, 99])
            for query in (EVERYTHING, draw.choice(QUERIES)[0]):
                rows = await storage.get(query, order=order, limit=limit)
                assert rows == await reference.get(query, order=order, limit=limit), f"operation {number}"
            assert len(storage) == len(reference)
        assert storage.num_evicted == reference.num_evicted
