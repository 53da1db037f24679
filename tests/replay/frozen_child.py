"""A buffer server, or a client of one, that a test stops (SIGSTOP) at a known moment.

usage: frozen_child.py serve ADDRESS | take ADDRESS NUMBER

``take`` prints the names of the groups that came, waits for a line, confirms them, and prints how that went.
"""

import asyncio
import sys

from forebay.io.address import Address
from forebay.replay import ConnectionLost, FIFOReplayPolicy, IndexedStorage, ReplayBuffer, serve
from forebay.replay.remote.link import BufferLink
from forebay.replay.remote.messages import TakeArguments
from forebay.types import Status


async def serve_here(address):
    async with serve(ReplayBuffer(FIFOReplayPolicy(), IndexedStorage()), address, max_live=4) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()


async def take(address, number):
    link = await BufferLink.open(Address.parse(address), None)
    arguments = TakeArguments(b"child", {"math": int(number)}, Status.COMPLETED, None)
    _, groups = await link.ask("take_batch", arguments)
    print(*(group[0].group_id for group in groups), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        await link.ask("keep", {"key": b"child"})
    except ConnectionLost:
        # As `RemoteReplayBuffer` does, which asks once more on a new connection.
        link = await BufferLink.open(Address.parse(address), None)
        try:
            await link.ask("keep", {"key": b"child"})
        except ConnectionLost as error:
            print(error, flush=True)
            return
    print("confirmed", flush=True)


what, *arguments = sys.argv[1:]
asyncio.run((serve_here if what == "serve" else take)(*arguments))
