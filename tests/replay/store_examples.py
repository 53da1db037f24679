"""Examples of what stores do, one sentence of the contract each; `NaiveStorage` is held to them, too.

The conformance suite compares a store with `NaiveStorage`; here its answers are written out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forebay.replay.query import ARCHIVED, StorageIndices, parse_query, plain_value
from forebay.replay.stores.contract import StorageBackend, TagValue, revive_row
from forebay.replay.stores.naive import NaiveStorage
from forebay.testing.store_rows import EVERYTHING, make_row, put_all, uids
from forebay.types import Status


async def fill(storage: StorageBackend) -> None:
    """Six rows named by their uids, of all kinds; the last is archived."""
    await storage.set_train_step("math", 5)
    await put_all(
        storage,
        make_row(0, "math", step=1, tags={"level": 3, "kind": "add"}),
        make_row(1, "math", step=4, tags={"level": 1.5, "ok": True}),
        make_row(2, "math", "aborted", staleness=2, tags={"level": True}),
        make_row(3, "code", staleness=0, priority=0.5, tags={"level": "3"}),
        make_row(4, "code", "failed", staleness=4),
        make_row(5, "code", staleness=1, step=9),
    )
    await storage.take([5], train_step=7)


class StorageExamples:
    """A subclass has the fixture `storage`."""

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

    async def test_what_queries_match(self, storage: StorageBackend) -> None:
        await fill(storage)
        for query, expected in QUERIES:
            assert [row.item for row in await storage.get(query)] == expected, query
            assert await storage.count(query) == len(expected), query

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
        for ask in (storage.get({}, order="reward"), storage.take_first(1, {}, order="reward")):
            with pytest.raises(ValueError, match="'reward'"):
                await ask

    async def test_staleness_is_as_given_until_a_train_step_is_known(self, storage: StorageBackend) -> None:
        await put_all(
            storage,
            make_row("given 3", staleness=3),
            make_row("step 2", staleness=5, step=2),
            make_row("step 0", staleness=2, step=0),
            make_row("given 1", staleness=1),
        )
        rows = await storage.get({}, order="-staleness")
        assert [row.item for row in rows] == ["step 2", "given 3", "step 0", "given 1"]
        assert await storage.get_train_step("math") is None
        expected = {
            2: [("given 3", 3), ("step 0", 1), ("given 1", 1), ("step 2", -1)],
            3: [("given 3", 3), ("step 0", 2), ("given 1", 1), ("step 2", 0)],
            4: [("given 3", 3), ("step 0", 3), ("step 2", 1), ("given 1", 1)],
            6: [("step 0", 5), ("given 3", 3), ("step 2", 3), ("given 1", 1)],
        }
        for train_step, order in expected.items():
            await storage.set_train_step("math", train_step)
            assert await storage.get_train_step("math") == train_step
            rows = await storage.get({}, order="-staleness")
            assert [(row.item, row.staleness) for row in rows] == order
            assert await storage.count({"staleness": {"$gte": 3}}) == sum(age >= 3 for _, age in order)

    async def test_a_task_ages_on_its_own_and_falls_only_where_it_is_let(self, storage: StorageBackend) -> None:
        await put_all(storage, make_row("m", step=0), make_row("c", task="code", step=0))
        await storage.set_train_step("nobody's", 20)
        for step in (10, 9, 10, 3):
            await storage.set_train_step("math", step)
            assert await storage.get_train_step("math") == 10
        assert [row.staleness for row in await storage.get({})] == [9, 0]
        await storage.set_train_step("code", 4)
        await storage.let_train_steps_fall()
        assert [row.staleness for row in await storage.get({})] == [9, 3]
        await storage.set_train_step("math", 6)
        assert [await storage.get_train_step(task) for task in ("math", "code")] == [6, 4]
        await storage.set_train_step("math", 5)
        assert [row.staleness for row in await storage.get({})] == [5, 3]

    async def test_take_removes_each_row_once_and_ignores_unknown_uids(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a"), make_row("b"))
        assert [row.item for row in await storage.take([b, 99, -1, 2**70, a, b])] == ["b", "a"]
        assert await storage.take([a, b]) == []
        assert len(storage) == 0
        a, b = await put_all(storage, make_row("a"), make_row("b"))
        await storage.take([a], train_step=1)
        taken = await storage.take([a, b], query={"status": "completed"})
        assert [row.item for row in taken] == ["b"]
        assert await storage.count({"status": "archived"}) == 1

    async def test_take_for_a_train_step_archives(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a", status=Status.ABORTED, tags={"x": 1}), make_row("b"))
        # A status and its value are the same.
        assert await storage.count({"status": "aborted"}) == await storage.count({"status": Status.ABORTED}) == 1
        (taken,) = await storage.take([a], train_step=4)
        assert (taken.item, plain_value(taken.status), taken.train_step) == ("a", "aborted", None)
        assert len(storage) == 1
        assert uids(await storage.get({})) == [b]
        (row,) = await storage.get({"status": "archived"})
        assert (row.uid, row.item, row.train_step, row.tags) == (a, "a", 4, {"x": 1})
        assert (plain_value(row.status), plain_value(row.status_before)) == (ARCHIVED, "aborted")
        await storage.take([a], train_step=6)
        (row,) = await storage.get({"status": "archived"})
        assert (row.train_step, plain_value(row.status_before)) == (6, "aborted")
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

    async def test_delete_where_removes_what_matches_and_counts_it(self, storage: StorageBackend) -> None:
        await fill(storage)
        assert await storage.delete_where({"staleness": {"$gte": 2}}, expected=2) == 3
        assert await storage.count({"staleness": {"$gte": 2}}) == 3
        assert await storage.delete_where({"staleness": {"$gte": 2}}, expected=3) == 3
        assert await storage.delete_where({"staleness": {"$gte": 2}}) == 0
        assert await storage.delete_where({"status": "archived", "train_step": {"$lte": 6}}) == 0
        assert await storage.delete_where({"status": "archived", "train_step": {"$lte": 7}}) == 1
        assert [row.item for row in await storage.get(EVERYTHING)] == [1, 3]

    async def test_update_keeps_ids_and_payload_and_ignores_unknown_uids(self, storage: StorageBackend) -> None:
        a, b = await put_all(storage, make_row("a", tags={"old": 1}), make_row("b"))
        (row,) = await storage.get({"uid": a}, rows_only=True)
        assert (row.item, row.tags) == (None, {"old": 1})
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
        # Twice, and unknown ones.
        await storage.delete([*ids[1::2], ids[1], 99])
        assert uids(await storage.get({})) == ids[::2]

    async def test_evict_removes_what_arrived_first_and_counts_it(self, storage: StorageBackend) -> None:
        await put_all(storage, make_row("a"), make_row("b", task="code"), make_row("c"), make_row("d"))
        await storage.take([0], train_step=1)
        assert await storage.evict(3) == []
        assert [row.item for row in await storage.evict(1)] == ["b", "c"]
        assert storage.num_evicted == {"code": 1, "math": 1}
        assert [row.item for row in await storage.get(EVERYTHING)] == ["a", "d"]


QUERIES: list[tuple[Any, list[int]]] = [
    ({}, [0, 1, 2, 3, 4]),
    ({"$and": []}, [0, 1, 2, 3, 4]),
    ({"$or": []}, []),
    ({"task_name": "math"}, [0, 1, 2]),
    ({"task_name": "math", "status": "completed"}, [0, 1]),
    ({"status": Status.FAILED}, [4]),
    ({"status": {"$in": [Status.FAILED, "aborted"]}}, [2, 4]),
    ({"status": {"$not_in": ["completed"]}}, [2, 4]),
    ({"status": {"$ne": "completed"}}, [2, 4]),
    ({"staleness": {"$gte": 2}}, [0, 2, 4]),
    ({"staleness": {"$gt": 2, "$lte": 4}}, [0, 4]),
    ({"staleness": {"$between": [2, 3]}}, [0, 2]),
    ({"staleness": 0}, [1, 3]),
    ({"staleness": 0.0}, [1, 3]),
    ({"staleness": False}, []),
    ({"staleness": {"$lt": "5"}}, []),
    ({"staleness": {"$lt": 2.5}}, [1, 2, 3]),
    ({"staleness": {"$lt": float("inf")}}, [0, 1, 2, 3, 4]),
    ({"staleness": {"$gt": -(10**30)}}, [0, 1, 2, 3, 4]),
    ({"staleness": {"$ne": "5"}}, [0, 1, 2, 3, 4]),
    ({"staleness": {}}, [0, 1, 2, 3, 4]),
    ({"priority": {"$lt": 1}}, [3]),
    ({"oldest_model_step": None}, [2, 3, 4]),
    ({"oldest_model_step": {"$lte": 4}}, [0, 1]),
    ({"oldest_model_step": {"$ne": 1}}, [1, 2, 3, 4]),
    ({"uid": {"$in": [4, 1, 77, 10**30]}}, [1, 4]),
    ({"uid": {"$in": [True, 1.0]}}, [1]),
    ({"uid": True}, []),
    ({"timestamp_id": {"$between": (1, 2)}}, [1, 2]),
    ({"staleness": {"$gte": np.int64(4)}}, [4]),
    ({"task_name": {"$in": ["code", "none"]}, "$or": [{"status": "failed"}]}, [4]),
    # More values, and more conditions, than the SQL stores put into one statement.
    ({"uid": {"$in": list(range(0, 40_000, 2))}}, [0, 2, 4]),
    ({"$or": [{"uid": 3, "priority": n} for n in range(1500)] + [{"uid": 1}]}, [1]),
    ({"tags.level": 3}, [0]),
    ({"tags.level": {"$gte": 1}}, [0, 1]),
    ({"tags.level": "3"}, [3]),
    ({"tags.level": True}, [2]),
    ({"tags.level": {"$ne": 3}}, [1, 2, 3, 4]),
    ({"tags.level": {"$not_in": [3, "3"]}}, [1, 2, 4]),
    ({"tags.level": {"$not_in": [3, True]}}, [1, 3, 4]),
    ({"tags.level": {"$lt": "a"}}, [3]),
    ({"tags.level": None}, []),
    ({"tags.nobody": {"$lte": 3}}, []),
    ({"tags.kind": {"$gt": "aaa"}}, [0]),
    ({"task_name": "x' OR '1'='1"}, []),
    ({"tags.x' OR '1'='1": {"$ne": 1}}, [0, 1, 2, 3, 4]),
    ({"task_name": {"$lt": "d\0\ud800"}}, [3, 4]),
    ({"$or": [{"task_name": "code", "staleness": {"$lt": 4}}, {"uid": 0}]}, [0, 3]),
    ({"$and": [{"task_name": "math"}, {"$or": [{"staleness": 2}, {"tags.ok": True}]}]}, [1, 2]),
    ({"train_step": {"$gte": 0}}, []),
    ({"uid": 5}, []),
    ({"status": "archived"}, [5]),
    ({"status": {"$in": ["archived", "failed"]}}, [4, 5]),
    ({"status": Status.ARCHIVED, "train_step": {"$lte": 7}}, [5]),
    ({"status": Status.ARCHIVED, "train_step": {"$gt": 7}}, []),
    ({"status": {"$gte": "archived"}}, [0, 1, 3, 4]),
    ({"status": {"$ne": "archived"}}, [0, 1, 2, 3, 4]),
    ({"status_before": "completed", "status": "archived"}, [5]),
    (StorageIndices("math", Status.COMPLETED), [0, 1]),
    (parse_query(StorageIndices("math", tags={"ok": True})), [1]),
]
"""Queries on what `fill` puts, and the payloads they find."""
