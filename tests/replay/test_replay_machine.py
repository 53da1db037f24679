"""Random operations on a buffer over any store, against the same buffer over NaiveStorage."""

import asyncio
import contextlib
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from replay_factory import make_state, same

from forebay.replay import (
    FIFOReplayPolicy,
    IndexedStorage,
    NaiveStorage,
    PrioritizedReplayPolicy,
    ReplayBuffer,
    SQLStorage,
    StalenessReplayPolicy,
)
from forebay.replay.reuse import Reuse
from forebay.types import Status
from postgres_server import empty_place

TASKS = ("math", "code")
LIVE = [status for status in Status if status is not Status.ARCHIVED]
STATUSES = st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.ABORTED, Status.FAILED, Status.EXPIRED])
TAGS = st.none() | st.fixed_dictionaries({"level": st.integers(0, 1)})
STEPS = st.integers(0, 6)


class Replay(RuleBasedStateMachine):
    """Both buffers must give the same answers, hold the same rows, and lose or double nothing."""

    kinds = ("indexed",)
    postgres_server = None

    def __init__(self):
        super().__init__()
        self.places = contextlib.ExitStack()
        self.folder = self.places.enter_context(tempfile.TemporaryDirectory())
        self.buffers, self.num_stores = [], 0
        self.runner = asyncio.Runner()
        self.num_put = 0
        self.uses = {}
        self.gone = Counter()
        self.highest_uid = -1

    @initialize(
        policy=st.sampled_from([FIFOReplayPolicy, StalenessReplayPolicy, PrioritizedReplayPolicy]),
        limit=st.none() | st.integers(3, 10),
        times=st.integers(1, 3),
        threshold=st.integers(1, 5),
        order=st.sampled_from(["newest", "priority", "success_rate"]),
    )
    def build(self, policy, limit, times, threshold, order):
        reuse = Reuse(times=times, stale_threshold=threshold, order=order) if times > 1 else None
        self.policy, self.options = policy, {"limit": limit, "reuse": reuse}
        self.uses = defaultdict(list)
        self.buffers = [self.new_buffer(kind) for kind in ("naive", self.kinds[0])]

    def new_buffer(self, kind):
        self.num_stores += 1
        store = {
            "naive": NaiveStorage,
            "indexed": IndexedStorage,
            "sqlite": lambda: SQLStorage(Path(self.folder) / f"{self.num_stores}.db"),
            "postgres": lambda: SQLStorage(self.places.enter_context(empty_place(self.postgres_server))),
        }[kind]()
        return ReplayBuffer(self.policy(), store, **self.options)

    def both(self, call):
        """The answer to `call(buffer)`, which must be the same for both."""
        reference, answer = (self.runner.run(call(buffer)) for buffer in self.buffers)
        assert same(answer, reference)
        return answer

    @rule(
        task=st.sampled_from(TASKS),
        statuses=st.lists(STATUSES, min_size=1, max_size=2),
        labels=st.lists(st.lists(st.integers(-1, 6), max_size=2), min_size=2, max_size=2),
        given_staleness=st.integers(0, 4),
        model_step=st.none() | STEPS,
        train_step=st.none() | STEPS,
        threshold=st.none() | st.integers(1, 4),
        tags=TAGS,
        priority=st.sampled_from([None, 0.0, 2.5]),
        scores=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=2),
    )
    def put(self, task, statuses, labels, given_staleness, model_step, train_step, threshold, tags, priority, scores):
        for buffer in self.buffers:
            group = [
                make_state(self.num_put, i, status=status, steps=labels[i], seq_staleness=given_staleness)
                for i, status in enumerate(statuses)
            ]
            for state, score in zip(group, scores, strict=False):
                state.reward = {"score": score}
            self.runner.run(
                buffer.put(
                    group,
                    task,
                    model_step=model_step,
                    current_train_step=train_step,
                    stale_threshold=threshold,
                    tags=tags,
                    priority=priority,
                )
            )
        self.num_put += 1

    @rule(count=st.integers(-1, 4), task=st.sampled_from(TASKS), status=STATUSES, tags=TAGS)
    def get(self, count, task, status, tags):
        groups = self.both(lambda buffer: buffer.get(count, task, status, tags=tags))
        self.gone["got"] += len(groups)

    @rule(sizes=st.fixed_dictionaries({task: st.integers(0, 3) for task in TASKS}), train_step=st.none() | STEPS)
    def take_batch(self, sizes, train_step):
        groups, counts = self.both(lambda buffer: buffer.take_batch(sizes, train_step=train_step))
        assert counts == {task: len(groups[task]) for task in TASKS}
        if train_step is None:
            self.gone["got"] += sum(counts.values())
        for group in (group for taken in groups.values() for group in taken):
            group[0].response = "changed by the trainer"
            group[0].message.clear()

    @rule(
        priorities=st.dictionaries(st.integers(0, 30), st.sampled_from([0.0, 0.5, 7.0]), max_size=5),
        by=st.sampled_from(["uid", "uid", "tags.level", "staleness"]),
        task=st.none() | st.sampled_from(TASKS),
    )
    def update_priorities(self, priorities, by, task):
        self.both(lambda buffer: buffer.update_priorities(priorities, by=by, task_name=task))

    @rule(sizes=st.fixed_dictionaries({task: st.integers(0, 3) for task in TASKS}), train_step=STEPS)
    def use_again(self, sizes, train_step):
        numbers = self.both(lambda buffer: buffer.count_usable(TASKS, train_step))
        consumed_at = {row[0]: row[8] for row in self.archived()}
        used = self.both(lambda buffer: buffer.use_again(sizes, train_step))
        if (reuse := self.options["reuse"]) is None:
            assert used == {}
            assert numbers == {}
            return
        assert {task: len(groups) for task, groups in used.items()} == {
            task: min(sizes[task], numbers[task]) for task in TASKS
        }
        for group in (group for groups in used.values() for group in groups):
            uses = self.uses[group[0].group_id]
            assert len(uses) < reuse.times - 1
            assert train_step > max([*uses, 0])
            assert max(state.seq_staleness for state in group) < reuse.stale_threshold
            assert consumed_at[group[0].group_id] < train_step
            uses.append(train_step)
            group[0].response = "changed by the trainer"
            group[0].message.clear()

    @rule(train_step=STEPS)
    def commit(self, train_step):
        before = self.archived()
        kept = {row[0] for row in before if not self.is_over(row, train_step)}
        self.both(lambda buffer: buffer.commit(train_step))
        # No less, because a restore may come, and no more, because memory is bounded.
        assert {row[0] for row in self.archived()} == kept
        self.gone["committed"] += len(before) - len(kept)

    def is_over(self, row, train_step):
        """Whether no step after `train_step` could use the row after a restore of it."""
        priority, oldest, consumed_at, before = row[6:10]
        if (reuse := self.options["reuse"]) is None or consumed_at > train_step:
            return consumed_at <= train_step
        num_uses = sum(step <= train_step for step in self.uses[row[0]])
        staleness = None if oldest is None else train_step - oldest
        is_fresh = staleness is not None and staleness < reuse.stale_threshold
        return not (before is Status.COMPLETED and priority > 0 and is_fresh and num_uses < reuse.times - 1)

    @rule(train_step=STEPS)
    def restore(self, train_step):
        self.both(lambda buffer: buffer.restore(train_step))
        for steps in self.uses.values():
            steps[:] = [step for step in steps if step <= train_step]

    @rule(
        thresholds=st.dictionaries(st.sampled_from(TASKS), st.integers(1, 4)),
        train_step=STEPS,
        statuses=st.none() | st.lists(STATUSES, max_size=2),
    )
    def refresh(self, thresholds, train_step, statuses):
        expired = self.both(lambda buffer: buffer.refresh_staleness(thresholds, train_step, statuses=statuses))
        assert set(expired) == set(thresholds)
        if statuses is None:
            for task, threshold in thresholds.items():
                old = {
                    "task_name": task,
                    "status": {"$in": ["completed", "aborted"]},
                    "staleness": {"$gte": threshold},
                }
                assert self.both(lambda buffer, old=old: buffer.storage.count(old)) == 0

    @rule(rarely=st.integers(0, 3), choice=st.integers(0, 3))
    def save_and_resume_each_on_another_store(self, rarely, choice):
        if rarely:
            return
        kinds = ["naive", self.kinds[0]]
        if choice == 3:
            kinds.reverse()
        else:
            kinds[1] = self.kinds[choice % len(self.kinds)]
        resumed = []
        for buffer, kind in zip(self.buffers, kinds, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                self.runner.run(buffer.save(Path(folder)))
                self.runner.run(buffer.close())
                resumed.append(self.new_buffer(kind))
                self.runner.run(resumed[-1].resume(folder))
        self.buffers = resumed

    def num_archived(self):
        return self.both(lambda buffer: buffer.storage.count({"status": "archived"}))

    def archived(self):
        """The rows, as `light_rows` shows them, with the group's name (that of its put) for the uid."""
        rows = self.both(lambda buffer: light_rows(buffer.storage, {"status": "archived"}, None))
        return [(int(row[-2][0].partition("/")[0]), *row[1:]) for row in rows]

    @invariant()
    def uses_are_noted_on_the_rows(self):
        if self.num_put and self.options["reuse"] is not None:
            for row in self.archived():
                noted = [int(step) for step in row[5]["used_at"].split()]
                assert noted == self.uses[row[0]]
                assert (row[5]["uses"], row[5]["last_use"]) == (len(noted), max(noted, default=0))

    @invariant()
    def same_rows_in_every_order(self):
        if self.num_put:
            query = {"status": {"$in": list(Status)}}
            for order in (None, "-staleness", "priority"):
                rows = self.both(lambda buffer, order=order: light_rows(buffer.storage, query, order))
            assert len({row[0] for row in rows}) == len(rows)

    @invariant()
    def nothing_is_lost_or_doubled(self):
        if not self.num_put:
            return
        counts = self.both(lambda buffer: buffer.count_statuses(TASKS, LIVE))
        live = sum(sum(cells.values()) for cells in counts.values())
        evicted = [sum(buffer.num_evicted.values()) for buffer in self.buffers]
        assert evicted[0] == evicted[1]
        assert all(len(buffer) == live for buffer in self.buffers)
        assert self.num_put == live + self.num_archived() + sum(self.gone.values()) + evicted[0]

    @invariant()
    def ids_only_grow(self):
        if self.num_put:
            newest = self.both(lambda buffer: newest_uid(buffer.storage))
            for buffer in self.buffers:
                assert newest < buffer.storage.state_dict()["next_uid"] == self.num_put

    def teardown(self):
        for buffer in self.buffers:
            self.runner.run(buffer.close())
        self.runner.close()
        self.places.close()


async def light_rows(storage, query, order):
    rows = await storage.get(query, order=order)
    return [
        (
            row.uid,
            row.timestamp_id,
            row.task_name,
            row.status,
            row.staleness,
            row.tags,
            row.priority,
            row.oldest_model_step,
            row.train_step,
            row.status_before,
            [state.rollout_id for state in row.item],
            [len(state.response_ids) for state in row.item],
        )
        for row in rows
    ]


async def newest_uid(storage):
    rows = await storage.get({}, order="-timestamp_id", limit=1, rows_only=True)
    return rows[0].uid if rows else -1


TestReplay = Replay.TestCase
TestReplay.settings = settings(stateful_step_count=30)


class ReplayOnSQLite(Replay):
    kinds = ("sqlite", "indexed")


class ReplayOnPostgres(Replay):
    kinds = ("postgres", "sqlite")


# Each step asks a database some thirty times, so fewer examples are tried.
TestReplayOnSQLite = ReplayOnSQLite.TestCase
TestReplayOnSQLite.settings = settings(stateful_step_count=30, max_examples=settings().max_examples // 5)


class TestReplayOnPostgres(ReplayOnPostgres.TestCase):
    settings = settings(stateful_step_count=20, max_examples=settings().max_examples // 10)

    @pytest.fixture(autouse=True)
    def _server(self, postgres_server):
        ReplayOnPostgres.postgres_server = postgres_server
