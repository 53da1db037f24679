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
from typing import Any, TypeVar

import pytest

from forebay.replay.policies import FIFOReplayPolicy
from forebay.replay.query import ARCHIVED, plain_value
from forebay.replay.stores.contract import StorageBackend, TagValue, revive_row
from forebay.replay.stores.naive import NaiveStorage
from forebay.testing.store_rows import EVERYTHING, QUERIES, fill, make_row, put_all, uids
from forebay.types import Status

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

    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            (None, "abcd"),
            ("timestamp_id", "abcd"),
            ("-timestamp_id", "dcba"),
            ("staleness", "adbc"),
            ("-staleness", "bcad"),
            ("priority", "cabd"),
            ("-priority", "dabc"),
        ],
    )
    async def test_orders_with_ties_in_arrival_order(
        self, storage: StorageBackend, order: str | None, expected: str
    ) -> None:
        await put_all(
            storage,
            make_row("a", staleness=1),
            make_row("b", staleness=2, task="code"),
            make_row("c", staleness=2, priority=0.5),
            make_row("d", staleness=1, priority=2.0),
        )
        for limit in (None, 0, 1, 2, 3, 4, 5, -1):
            rows = await storage.get({}, order=order, limit=limit)
            wanted = expected if limit is None else expected[: max(limit, 0)]
            assert "".join(row.item for row in rows) == wanted
        by_uid = await storage.get({"uid": {"$lte": 99}}, order=order)
        listed = await storage.get({"uid": {"$in": [3, 1, 0, 2, 77]}}, order=order)
        assert uids(by_uid) == uids(listed) == uids(await storage.get({}, order=order))
        for name in expected:
            assert [row.item for row in await storage.take_first(1, {}, order=order)] == [name]

    async def test_an_unknown_order_is_an_error(self, storage: StorageBackend) -> None:
        with pytest.raises(ValueError, match="'reward'"):
            await storage.get({}, order="reward")
        with pytest.raises(ValueError, match="'reward'"):
            await storage.take_first(1, {}, order="reward")

    # Isolation

    async def test_rows_only_leaves_the_payload_out(self, storage: StorageBackend) -> None:
        await storage.put(make_row("a", tags={"level": 3}))
        (row,) = await storage.get({}, rows_only=True)
        assert row.item is None
        assert row.tags == {"level": 3}

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

    async def test_status_members_and_their_values_are_the_same(self, storage: StorageBackend) -> None:
        uid = await storage.put(make_row(status=Status.ABORTED))
        assert await storage.count({"status": "aborted"}) == 1
        assert await storage.count({"status": Status.ABORTED}) == 1
        (row,) = await storage.take([uid], train_step=1)
        assert plain_value(row.status) == "aborted"
        (archived,) = await storage.get({"status": "archived"})
        assert plain_value(archived.status) == ARCHIVED
        assert plain_value(archived.status_before) == "aborted"

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

    async def test_staleness_is_as_given_until_a_train_step_is_known(self, storage: StorageBackend) -> None:
        await put_all(storage, make_row("a", staleness=5, step=8), make_row("b", staleness=1, step=2))
        assert [row.item for row in await storage.get({}, order="-staleness")] == ["a", "b"]
        await storage.set_train_step("math", 10)
        rows = await storage.get({}, order="-staleness")
        assert [(row.item, row.staleness) for row in rows] == [("b", 7), ("a", 1)]
        assert await storage.get_train_step("math") == 10
        assert await storage.get_train_step("code") is None

    async def test_labeled_and_unlabeled_rows_are_ranked_together(self, storage: StorageBackend) -> None:
        await put_all(
            storage,
            make_row("given 3", staleness=3),
            make_row("step 2", step=2),
            make_row("step 0", step=0),
            make_row("given 1", staleness=1),
        )
        expected = {
            2: [("given 3", 3), ("step 0", 1), ("given 1", 1), ("step 2", -1)],
            3: [("given 3", 3), ("step 0", 2), ("given 1", 1), ("step 2", 0)],
            4: [("given 3", 3), ("step 0", 3), ("step 2", 1), ("given 1", 1)],
            6: [("step 0", 5), ("given 3", 3), ("step 2", 3), ("given 1", 1)],
        }
        for train_step, order in expected.items():
            await storage.set_train_step("math", train_step)
            rows = await storage.get({}, order="-staleness")
            assert [(row.item, row.staleness) for row in rows] == order
            assert await storage.count({"staleness": {"$gte": 3}}) == sum(age >= 3 for _, age in order)

    async def test_a_train_step_falls_only_where_it_is_let(self, storage: StorageBackend) -> None:
        await put_all(storage, make_row("m", step=0), make_row("c", task="code", step=0))
        for step in (10, 9, 10, 3):
            await storage.set_train_step("math", step)
            assert await storage.get_train_step("math") == 10
        assert await storage.count({"staleness": 9}) == 1
        await storage.set_train_step("code", 4)
        await storage.let_train_steps_fall()
        assert [row.staleness for row in await storage.get({})] == [9, 3]
        await storage.set_train_step("math", 6)
        assert [await storage.get_train_step(task) for task in ("math", "code")] == [6, 4]
        await storage.set_train_step("math", 5)
        assert [row.staleness for row in await storage.get({})] == [5, 3]

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

    async def test_a_policy_ignores_an_empty_group(self, storage: StorageBackend) -> None:
        policy = FIFOReplayPolicy()
        await policy.put(make_row([]), storage)
        await policy.put_many([make_row([]), make_row(["a"])], storage)
        assert [row.item for row in await storage.get({})] == [["a"]]

    async def test_tasks_age_on_their_own(self, storage: StorageBackend) -> None:
        await put_all(storage, make_row("m", step=0), make_row("c", task="code", step=0))
        await storage.set_train_step("math", 5)
        await storage.set_train_step("nobody's", 9)
        rows = {row.item: row.staleness for row in await storage.get({})}
        assert rows == {"m": 4, "c": 0}

    # Taking, deleting, updating

    async def test_take_removes_each_row_once_and_ignores_unknown_uids(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a"), make_row("b"))
        assert [row.item for row in await storage.take([b, 99, -1, 2**70, a, b])] == ["b", "a"]
        assert await storage.take([a, b]) == []
        assert len(storage) == 0

    async def test_take_leaves_rows_that_do_not_match_any_more(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a"), make_row("b"))
        await storage.take([a], train_step=1)
        taken = await storage.take([a, b], query={"status": "completed"})
        assert [row.item for row in taken] == ["b"]
        assert await storage.count({"status": "archived"}) == 1

    async def test_take_for_a_train_step_archives(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a", status="aborted", tags={"x": 1}), make_row("b"))
        (taken,) = await storage.take([a], train_step=4)
        assert (taken.item, taken.status, taken.train_step) == ("a", "aborted", None)
        assert len(storage) == 1
        assert uids(await storage.get({})) == [b]
        (row,) = await storage.get({"status": "archived"})
        assert (row.uid, row.item, row.train_step, row.status_before) == (a, "a", 4, "aborted")
        assert row.tags == {"x": 1}
        await storage.take([a], train_step=6)
        (row,) = await storage.get({"status": "archived"})
        assert (row.train_step, row.status_before) == (6, "aborted")
        assert [row.item for row in await storage.take_first(9, {}, train_step=6)] == ["b"]
        assert await storage.count({"status": "archived", "train_step": 6}) == 2

    async def test_drawn_rows_are_those_at_their_share_of_the_sum(self, storage: StorageBackend) -> None:
        """Priorities 1 2 0 5 in order of arrival make the steps 1, 3, 3, 8 of the running sum."""
        query = {"task_name": "math", "status": "completed"}
        for name, priority in {"a": 1.0, "b": 2.0, "zero": 0.0, "c": 5.0}.items():
            await storage.put(make_row(name, priority=priority))
        await put_all(storage, make_row("other", "code", priority=9.0), make_row("d", status="failed"))
        # 0.375 of 8 is where "b" ends; of what is left, 0.999 of 3 lies in "b".
        numbers = iter([0.375, 0.999, 0.999]).__next__
        drawn = await storage.take_drawn(2, query, numbers, train_step=3)
        assert [(row.item, row.status, row.train_step) for row in drawn] == [
            ("c", "completed", None),
            ("b", "completed", None),
        ]
        assert uids(await storage.get({"status": "archived", "train_step": 3})) == [1, 3]
        assert [row.item for row in await storage.take_drawn(9, query, numbers)] == ["a", "zero"]
        assert await storage.take_drawn(1, query, numbers) == []
        assert await storage.take_drawn(0, {}, numbers) == []
        assert len(storage) == 2

    async def test_draws_follow_every_change(self, storage: StorageBackend) -> None:
        """Rows that are put, given another priority, taken, brought back or removed after the first draw."""
        query = {"task_name": "math", "status": "completed"}

        async def draw(number: float) -> Any:
            """The row that `number` draws, which then comes back to its place."""
            (row,) = await storage.take_drawn(1, query, lambda: number, train_step=1)
            (archived,) = await storage.get({"status": "archived", "uid": row.uid}, rows_only=True)
            await storage.update([revive_row(archived)])
            return row.item

        ids = await put_all(storage, *(make_row(name) for name in "abc"))
        assert [await draw(number) for number in (0.0, 0.4, 0.7)] == ["a", "b", "c"]
        ids += await put_all(storage, make_row("d", priority=3.0))
        assert [await draw(number) for number in (0.2, 0.5, 0.9)] == ["b", "d", "d"]
        assert await storage.update_priorities({ids[0]: 5.0, ids[3]: 0.0, 99: 1.0}) == 2
        assert [await draw(number) for number in (0.7, 0.8, 0.9)] == ["a", "b", "c"]
        assert [row.priority for row in await storage.get({}, order="-priority")] == [5.0, 1.0, 1.0, 0.0]
        await storage.delete([ids[0]])
        (row,) = await storage.get({"uid": ids[1]}, rows_only=True)
        row.status = "failed"
        await storage.update([row])
        assert [await draw(number) for number in (0.0, 0.9)] == ["c", "c"]
        await storage.take([ids[2]], train_step=1)
        assert await storage.update_priorities({ids[2]: 7.0}) == 0
        assert await draw(0.9) == "d"

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

    async def test_delete_ignores_unknown_uids(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a"), make_row("b"))
        await storage.delete([a, a, 99])
        assert uids(await storage.get({})) == [b]

    async def test_delete_where_removes_what_matches_and_counts_it(self, storage: StorageBackend) -> None:
        await fill(storage)
        assert await storage.delete_where({"staleness": {"$gte": 2}}, expected=2) == 3
        assert await storage.count({"staleness": {"$gte": 2}}) == 3
        assert await storage.delete_where({"staleness": {"$gte": 2}}, expected=3) == 3
        assert await storage.delete_where({"staleness": {"$gte": 2}}) == 0
        assert await storage.delete_where({"status": "archived", "train_step": {"$lte": 6}}) == 0
        assert await storage.delete_where({"status": "archived", "train_step": {"$lte": 7}}) == 1
        assert [row.item for row in await storage.get(EVERYTHING)] == [1, 3]

    async def test_update_keeps_ids_and_payload_and_ignores_unknown_uids(
        self, storage: StorageBackend
    ) -> None:
        a, b = await put_all(storage, make_row("a", tags={"old": 1}), make_row("b"))
        (row,) = await storage.get({"uid": a}, rows_only=True)
        row.status, row.timestamp_id, row.priority, row.tags = "expired", 50, 2.0, {"new": 1}
        row.task_name = "code"
        unknown = make_row("z")
        unknown.uid = 99
        await storage.update([row, unknown])
        rows = await storage.get({})
        assert [(r.uid, r.timestamp_id, r.status, r.item) for r in rows] == [
            (a, 0, "expired", "a"),
            (b, 1, "completed", "b"),
        ]
        assert await storage.count({"tags.old": 1}) == 0
        assert await storage.count({"task_name": "code", "tags.new": 1, "staleness": 0}) == 1
        row.item = "new"
        other = rows[1]
        other.status = "failed"
        assert await storage.update_if([row, other], {"status": "expired"}, expected=2) == 1
        assert [r.item for r in await storage.get({"status": "expired"})] == ["a"]
        assert await storage.update_if([row, other, unknown], {"status": "expired"}, expected=1) == 1
        assert [r.item for r in await storage.get({"status": "expired"})] == ["new"]
        assert await storage.count({"status": "failed"}) == 0

    async def test_rows_that_come_back_take_their_old_place(self, storage: StorageBackend) -> None:
        ids = await put_all(storage, *(make_row(i) for i in range(32)))
        rows = await storage.get({})
        for row in rows:
            row.status = "aborted"
        await storage.update(rows[:-1])
        for row in reversed(rows[:-1]):
            row.status = "completed"
            await storage.update([row])
        assert uids(await storage.get({"status": "completed"})) == ids
        assert uids(await storage.get({}, order="-timestamp_id", limit=3)) == ids[:-4:-1]
        await storage.delete(ids[1::2])
        assert uids(await storage.get({})) == ids[::2]

    async def test_evict_removes_what_arrived_first_and_counts_it(self, storage: StorageBackend) -> None:
        await put_all(storage, make_row("a"), make_row("b", task="code"), make_row("c"), make_row("d"))
        await storage.take([0], train_step=1)
        assert await storage.evict(3) == []
        assert [row.item for row in await storage.evict(1)] == ["b", "c"]
        assert storage.num_evicted == {"code": 1, "math": 1}
        assert [row.item for row in await storage.get(EVERYTHING)] == ["a", "d"]

    # State

    async def test_a_state_moves_to_another_store_and_back(self, storage: StorageBackend) -> None:
        await storage.set_train_step("math", 6)
        ids = await put_all(
            storage,
            make_row("a", step=1),
            make_row("b", staleness=2, tags={"x": True}),
            make_row("c", priority=0.0),
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
        for wrong in (
            {"version": 99},
            {"items": state["items"] * 2},
            {"next_uid": 1},
            {"next_timestamp_id": 0},
        ):
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
