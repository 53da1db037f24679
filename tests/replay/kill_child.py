"""A process that puts, takes and commits at random until it is killed; the parent reads its journal.

usage: kill_child.py URL SEED ROUND STEP, where STEP is the last checkpoint. Each line of the journal is
``begin`` or ``end``, what, and its arguments; ``end`` is written when the call has returned.
"""

import asyncio
import random
import sys

import numpy as np

from forebay.replay import FIFOReplayPolicy, ReplayBuffer, SQLStorage, StalenessReplayPolicy
from forebay.types import RolloutState, Status


def note(*words):
    print(*words, flush=True)


def make_group(name, num_tokens):
    ids = np.arange(num_tokens)
    return [
        RolloutState([], group_id=name, response_ids=ids, logprobs=ids / 7, status=Status.COMPLETED) for _ in range(2)
    ]


async def produce(buffer, rng, round_):
    async def put(name):
        note("begin put", name)
        await buffer.put(make_group(name, rng.randrange(2000)), "math", model_step=rng.randrange(5))
        note("end put", name)

    number = 0
    while True:
        names = [f"{round_}-{number + i}" for i in range(rng.randrange(1, 6))]
        number += len(names)
        await asyncio.gather(*map(put, names))


async def consume(buffer, rng, step):
    committed = step
    while True:
        step += 1
        note("begin take", step)
        groups, _ = await buffer.take_batch({"math": rng.randrange(1, 8)}, train_step=step)
        note("end take", step, *(group[0].group_id for group in groups["math"]))
        if rng.random() < 0.4:
            committed = rng.randrange(committed, step + 1)
            note("begin commit", committed)
            await buffer.commit(committed)
            note("end commit", committed)


async def main(url, seed, round_, step):
    rng = random.Random(int(seed))
    policy = rng.choice([FIFOReplayPolicy, StalenessReplayPolicy])
    buffer = ReplayBuffer(policy(), SQLStorage(url))
    note("begin restore", step)
    await buffer.restore(int(step))
    note("end restore", step)
    await asyncio.gather(produce(buffer, rng, round_), consume(buffer, rng, int(step)))


asyncio.run(main(*sys.argv[1:]))
