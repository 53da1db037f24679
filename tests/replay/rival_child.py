"""A process that puts groups of its own and takes whatever it gets, beside others; prints what it took.

usage: rival_child.py URL NAME NUM_GROUPS. It begins when a line comes on stdin, whose text is the first part
of the names of its groups, and ends its output with an empty line.
"""

import asyncio
import sys

from forebay.replay import FIFOReplayPolicy, ReplayBuffer, SQLStorage, StalenessReplayPolicy
from forebay.types import RolloutState, Status


async def main(url, name, num_groups):
    policy = FIFOReplayPolicy() if int(name) % 2 else StalenessReplayPolicy()
    buffer = ReplayBuffer(policy, SQLStorage(url))
    print("ready", flush=True)

    async def put_all(prefix):
        for number in range(int(num_groups)):
            group = [RolloutState([], group_id=f"{prefix}-{name}-{number}", status=Status.COMPLETED)]
            await buffer.put(group, "math", tags={"rival": int(name)})

    async def take_all():
        while groups := (await buffer.take_batch({"math": 3}, train_step=1))[0]["math"]:
            for group in groups:
                print(group[0].group_id)

    while prefix := sys.stdin.readline().strip():
        putting = asyncio.create_task(put_all(prefix))
        while not putting.done():
            await take_all()
            # Lets the put that is going on end.
            await asyncio.wait([putting], timeout=0)
        await putting
        await take_all()
        print(flush=True)
    await buffer.close()


asyncio.run(main(*sys.argv[1:]))
