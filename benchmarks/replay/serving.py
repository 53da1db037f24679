"""A buffer in another process, for the benchmarks: started, connected to, ended with the block.

Usage: python benchmarks/replay/serving.py ADDRESS      (what `connected` starts; ends with its input)

    connected(folder) --starts--> serving.py: ReplayBuffer over IndexedStorage, most stale first
            '--------- Unix socket ---------'
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from forebay.replay import IndexedStorage, RemoteReplayBuffer, ReplayBuffer, StalenessReplayPolicy, serve

READY = b"ready\n"


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[RemoteReplayBuffer]:
    """A client of a buffer in a new process, which listens in `folder`."""
    address = str(folder / "buffer.sock")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, address, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    said = await process.stdout.readline()
    assert said == READY, f"the server said {said!r}"
    client = await RemoteReplayBuffer.connect(address)
    try:
        yield client
    finally:
        await client.close()
        process.stdin.close()
        await process.wait()


async def serve_until_input_ends(address: str) -> None:
    buffer = ReplayBuffer(StalenessReplayPolicy(), IndexedStorage())
    async with serve(buffer, address):
        sys.stdout.buffer.write(READY)
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve_until_input_ends(sys.argv[1]))
