"""Random schedules of workers, consumers, versions, cancellations and restarts, on virtual time.

A witness outside the buffer knows what was sent and what the version is, and checks all that is served.
"""

import asyncio
import os
import random
import tempfile
from collections import Counter

from fragment_factory import make_fragment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.aio import virtual_time
from forebay.fragments import FragmentIndex, FragmentMetadata, FragmentStore, RateLimit, ReplayBufferActor

NUM_SCHEDULES = 10_000 if os.environ.get("FOREBAY_SOAK") == "1" else 60
WORKERS = ("a", "b", "c")
STEPS = {
    "add": 20,
    "add_many": 20,
    "fetch": 25,
    "foreign": 3,
    "cancel": 4,
    "release": 10,
    "renew": 3,
    "newer": 6,
    "other": 1,
    "goodbye": 2,
    "passing": 6,
    "restart": 3,
}
"""How often each comes, of about a hundred."""


def draw_arguments(step, rng):
    match step:
        case "add":
            return rng.choice(WORKERS), rng.choice([-2, -1, -1, 0, 0, 0]), rng.choice([1] * 7 + [2])
        case "add_many":
            return rng.choice(WORKERS), rng.randint(2, 9), 1
        case "foreign" | "goodbye":
            return (rng.choice(WORKERS),)
        case "fetch":
            return rng.randint(1, 4), rng.choice([None, None, 3.0])
        case "passing":
            return (rng.choice([0.0, 1.0, 30.0]),)
        case "newer":
            return (rng.choice([1, 1, 2]),)
        case "cancel" | "release" | "renew":
            return (rng.randrange(10),)
    return ()


@st.composite
def buffer_settings(draw):
    reuse = draw(st.integers(1, 3))
    max_chunks = draw(st.integers(4, 6))
    limits = st.builds(
        RateLimit,
        samples_per_insert=st.just(1.0),
        min_chunks=st.integers(1, 3),
        error_buffer=st.sampled_from([1.0, 4.0]),
    )
    return {
        "max_chunks": max_chunks,
        "max_staleness": draw(st.integers(0, 2)),
        "max_reuse": reuse,
        "fragments_per_chunk": draw(st.integers(1, 3)),
        "rate_limit": draw(st.none() | limits),
        "lease_s": draw(st.sampled_from([20.0, 1000.0])),
        "worker_timeout_s": 50.0,
        "orphan_grace_s": 40.0,
    }


class Witness:
    """Drives one buffer and knows better."""

    def __init__(self, rules, folder):
        self.rules, self.config = rules, {"path": folder}
        self.buffer = ReplayBufferActor(database_config=self.config, **rules)
        self.store = FragmentStore(**self.config)
        self.session, self.version = "", -1
        self.next_fid = Counter()
        self.sent = {}
        self.uses = Counter()
        self.asked, self.served = [], []
        self.leases = {}
        self.tasks = []

    async def run(self, rng):
        for step in rng.choices(list(STEPS), list(STEPS.values()), k=60):
            await getattr(self, step)(*draw_arguments(step, rng))
            await asyncio.sleep(0)
            await self.check_account()
        await self.finish()

    def spawn(self, work):
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    # Workers.

    async def add(self, worker, age, stride):
        self.next_fid[worker] += stride
        self.spawn(self.announce(worker, self.next_fid[worker], self.version + age, self.session))

    async def add_many(self, worker, count, stride):
        for _ in range(count):
            await self.add(worker, 0, stride)

    async def foreign(self, worker):
        self.next_fid[worker] += 1
        self.spawn(self.announce(worker, self.next_fid[worker], self.version, "foreign"))

    async def announce(self, worker, fid, version, session):
        fragment_id = self.store.add_fragment(make_fragment(worker, fid, steps=1, size=1))
        self.sent[fragment_id] = metadata = FragmentMetadata(worker, fid, version, session)
        await self.buffer.add_fragment(fragment_id, metadata)

    async def goodbye(self, worker):
        await self.buffer.remove_worker(worker)

    # Consumers.

    async def fetch(self, num_chunks, timeout_s):
        self.asked.append(len(self.asked))
        self.spawn(self.consume(self.asked[-1], num_chunks, timeout_s))

    async def consume(self, number, num_chunks, timeout_s):
        count = num_chunks * self.rules["fragments_per_chunk"]
        batch = await self.buffer.fetch_fragments(count, timeout_s=timeout_s)
        self.served.append(number)
        self.check_batch(batch, num_chunks)
        end_s = asyncio.get_running_loop().time() + self.rules["lease_s"]
        self.leases[batch.lease.lease_id] = batch, end_s

    def check_batch(self, batch, num_chunks):
        length = self.rules["fragments_per_chunk"]
        assert len(set(batch.fragment_ids)) == len(batch) == num_chunks * length
        self.uses.update(batch.fragment_ids)
        for start in range(0, len(batch), length):
            chunk = batch[start : start + length]
            known = [self.sent[fragment_id] for _, fragment_id in chunk]
            assert [index for index, _ in chunk] == [
                FragmentIndex(each.worker_uuid, each.fid_in_worker) for each in known
            ]
            first = known[0]
            assert all(metadata.worker_uuid == first.worker_uuid for metadata in known)
            assert [metadata.fid_in_worker - first.fid_in_worker for metadata in known] == list(range(length))
            assert {metadata.session_id for metadata in known} == {self.session}
            oldest = min(metadata.model_version for metadata in known)
            assert self.version - oldest <= self.rules["max_staleness"]
            assert set(batch.staleness[start : start + length]) == {self.version - oldest}
        assert max(self.uses.values()) <= self.rules["max_reuse"]

    async def cancel(self, number):
        if self.tasks:
            self.tasks[number % len(self.tasks)].cancel()

    async def release(self, number):
        if self.leases:
            lease_id = list(self.leases)[number % len(self.leases)]
            batch, _ = self.leases.pop(lease_id)
            await self.buffer.release(batch.lease)

    async def renew(self, number):
        if self.leases:
            lease_id = list(self.leases)[number % len(self.leases)]
            batch, end_s = self.leases[lease_id]
            now_s = asyncio.get_running_loop().time()
            renewed = await self.buffer.renew(batch.lease)
            assert renewed == (now_s < end_s)
            self.leases[lease_id] = batch, now_s + self.rules["lease_s"] if renewed else end_s

    # The trainer, time and accidents.

    async def set_version(self, session, version):
        # Both at once: who is woken by this is served under the new version.
        self.session, self.version = session, version
        await self.buffer.update_model_version(session, version)

    async def newer(self, by):
        await self.set_version(self.session, self.version + by)

    async def other(self):
        await self.set_version(self.session + "+", 0)

    async def passing(self, seconds):
        await asyncio.sleep(seconds)

    async def restart(self):
        """The buffer dies; those who wait for it are told when they are, and the next one takes over."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        now_s = asyncio.get_running_loop().time()
        self.buffer = ReplayBufferActor(database_config=self.config, **self.rules)
        for lease_id, (batch, end_s) in list(self.leases.items()):
            if await self.buffer.renew(batch.lease):
                self.leases[lease_id] = batch, now_s + self.rules["lease_s"]
            else:
                assert end_s <= now_s
                del self.leases[lease_id]

    async def check_account(self):
        metrics = await self.buffer.metrics()
        held = metrics["chunks"] * self.rules["fragments_per_chunk"] + metrics["partial_fragments"]
        dropped = sum(value for name, value in metrics.items() if name.startswith("dropped/"))
        assert metrics["added_fragments"] == held + metrics["used_up_fragments"] + dropped
        assert metrics["chunks"] <= self.rules["max_chunks"]
        assert self.served == sorted(self.served)
        now_s = asyncio.get_running_loop().time()
        for batch, end_s in self.leases.values():
            if now_s < end_s:
                assert all(fragment_id in self.store for fragment_id in batch.fragment_ids)
        for task in self.tasks:
            if task.done() and not task.cancelled() and not isinstance(task.exception(), TimeoutError):
                task.result()

    async def finish(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for batch, _ in self.leases.values():
            await self.buffer.release(batch.lease)
        await self.other()
        # Leases of fetches whose caller was gone, and payloads nobody announced.
        for _ in range(3):
            await asyncio.sleep(2000.0)
            await self.buffer.remove_worker("nobody")
        assert len(self.store) == 0
        metrics = await self.buffer.metrics()
        assert (metrics["held_fragments"], metrics["leases"]) == (0, 0)
        await self.buffer.close()


@settings(max_examples=NUM_SCHEDULES, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(buffer_settings(), st.integers(0, 2**32))
def test_no_schedule_breaks_a_bound_or_loses_a_fragment(rules, seed):
    async def main(folder):
        await Witness(rules, folder).run(random.Random(seed))

    with tempfile.TemporaryDirectory() as folder:
        virtual_time.run(main(folder))
