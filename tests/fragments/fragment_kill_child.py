"""A process with a buffer, workers and consumers, until it is killed; the parent reads its journal.

usage: fragment_kill_child.py FOLDER SEED ROUND [LEASE ...], the leases that the parent knows to be in force.
Each line of the journal is ``begin`` or ``end``, what, and its arguments; ``end`` when the call has returned.
"""

import asyncio
import random
import sys

from fragment_factory import make_fragment
from kill_rules import RULES

from forebay.fragments import FragmentMetadata, FragmentStore, ReplayBufferActor


def note(*words):
    print(*words, flush=True)


async def work(buffer, store, rng, worker):
    first = 0
    while True:
        fids = range(first, first := first + rng.randint(1, 4))
        size = rng.choice([3, 3, 20_000])
        ids = store.add_fragments([make_fragment(worker, fid, steps=1, size=size) for fid in fids])
        for fid, fragment_id in zip(fids, ids, strict=True):
            await buffer.add_fragment(fragment_id, FragmentMetadata(worker, fid, 0, "s"))
            note("end add", fragment_id)
        await asyncio.sleep(0)


async def consume(buffer, store, rng, leases):
    while True:
        if leases and rng.random() < len(leases) / 8:
            lease_id = leases.pop(rng.randrange(len(leases)))
            note("begin release", lease_id)
            assert await buffer.release(lease_id), lease_id
            note("end release", lease_id)
        note("begin fetch")
        batch = await buffer.fetch_fragments(2 * rng.randint(1, 3))
        store.stack(batch.fragment_ids[:1])
        note("end fetch", batch.lease.lease_id, *batch.fragment_ids)
        leases.append(batch.lease.lease_id)


async def main(folder, seed, round_, *leases):
    rng = random.Random(int(seed))
    config = {"path": folder, "max_bytes": 256 << 20}
    buffer, store = ReplayBufferActor(database_config=config, **RULES), FragmentStore(**config)
    for lease_id in leases:
        note("end renew", lease_id, await buffer.renew(lease_id))
    await buffer.update_model_version("s", 0)
    workers = [work(buffer, store, rng, f"{round_}-{number}") for number in range(3)]
    await asyncio.gather(*workers, consume(buffer, store, rng, list(leases)))


asyncio.run(main(*sys.argv[1:]))
