"""A served fragment buffer, or a client of it, that is stopped (SIGSTOP): nobody waits for it for ever."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager, contextmanager

import pytest
from fragment_factory import SETTINGS, fids, send

from forebay.fragments import BufferClosed, FragmentStore, RemoteFragmentBuffer, serve
from forebay.io.link import Link

LONG_S = 600.0
SHORT_S = 0.1

SERVER = """
import asyncio, json, sys
from forebay.fragments import ReplayBufferActor, serve

async def main(path, settings):
    async with serve(ReplayBufferActor(**json.loads(settings)), path):
        print("listening", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""

CLIENT = """
import asyncio, sys
from forebay.fragments import RemoteFragmentBuffer

async def main(path):
    client = await RemoteFragmentBuffer.connect(path)
    fetching = asyncio.create_task(client.fetch_fragments(1))
    while not (await client.metrics())["waiting_fetches"]:
        pass
    print("waiting", flush=True)
    await fetching

asyncio.run(main(*sys.argv[1:]))
"""


@asynccontextmanager
async def running(code, *arguments):
    """A process, once it has said its first line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@contextmanager
def frozen(process):
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "socket"


async def test_calls_to_a_frozen_server_can_be_cancelled_and_end_by_themselves(path, tmp_path):
    settings = SETTINGS | {"max_reuse": 2, "database_config": {"path": str(tmp_path / "store")}}
    async with running(SERVER, path, json.dumps(settings)) as process:
        client = await RemoteFragmentBuffer.connect(path, limit_s=LONG_S)
        hasty = await RemoteFragmentBuffer.connect(path, limit_s=2.0)
        store = FragmentStore(**await client.get_database_config())
        await send(client, store, "w", [0])
        with frozen(process):
            for call in (client.fetch_fragments(1), client.metrics(), client.release("no lease")):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(SHORT_S):
                        await call
            with pytest.raises(BufferClosed, match=f"{path}' has been silent for 2 s"):
                await hasty.fetch_fragments(1)
            with pytest.raises(BufferClosed, match="silent"):
                await hasty.metrics()
            with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
                await RemoteFragmentBuffer.connect(path, limit_s=SHORT_S)
            await hasty.disconnect()
        # What the cancelled fetch had been given, if it was, has been given back.
        while (metrics := await client.metrics())["leases"]:
            pass
        assert metrics["waiting_fetches"] == 0
        assert fids(await client.fetch_fragments(1)) == [0]
        await client.disconnect()


async def test_a_frozen_client_does_not_hold_up_the_line(make_plain, path, store):
    async with serve(make_plain(), path, client_limit_s=2.0), running(CLIENT, path) as child:
        with frozen(child):
            client = await RemoteFragmentBuffer.connect(path, limit_s=2.0)
            while (await client.metrics())["waiting_fetches"]:
                await asyncio.sleep(0)
            await send(client, store, "w", [0])
            assert fids(await client.fetch_fragments(1)) == [0]
            await client.disconnect()


async def test_whatever_ends_the_reading_ends_the_connection(make_plain, path, monkeypatch):
    async with serve(make_plain(), path):
        client = await RemoteFragmentBuffer.connect(path)
        error = MemoryError("too large")

        def fail(*_):
            raise error

        fetching = asyncio.create_task(client.fetch_fragments(1))
        await asyncio.sleep(0)
        monkeypatch.setattr(Link, "read", fail)
        for call in (client.metrics(), fetching, client.metrics()):
            with pytest.raises(BufferClosed, match="MemoryError") as caught:
                await call
            assert caught.value.__cause__ is error
        await client.disconnect()
