"""A client that gets stuck, so that a test can kill it at a known moment.

usage: server_child.py ADDRESS take|archive NUMBER; it prints the names of the groups that came, then waits.
``take`` has not confirmed them; ``archive``, for train step 5, has.
"""

import asyncio
import sys

from forebay.io.address import Address
from forebay.replay.remote.link import BufferLink
from forebay.replay.remote.messages import TakeArguments
from forebay.types import Status


async def main(address, what, number):
    link = await BufferLink.open(Address.parse(address), None)
    step = 5 if what == "archive" else None
    arguments = TakeArguments(b"child", {"math": int(number)}, Status.COMPLETED, step)
    _, groups = await link.ask("take_batch", arguments)
    if what == "archive":
        await link.ask("keep", {"key": b"child"})
    print(*(group[0].group_id for group in groups), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
