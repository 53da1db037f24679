"""The turn to write to an SQLite file: a process that is stopped while it has it holds up nobody for ever."""

import asyncio
import logging
import subprocess
import sys

import pytest
from replay_factory import make_row

from forebay.io.messages import error_of, failure_of
from forebay.replay import FIFOReplayPolicy, ReplayBuffer, SQLStorage, StoreBusy
from forebay.replay.remote.messages import ERRORS
from forebay.replay.stores.sql import connections, writes
from forebay.types import RolloutState, Status

HOLDER = """
import signal, os, sys
import sqlalchemy as sa
from forebay.replay.stores.sql.connections import write_turn
with write_turn(sa.make_url(sys.argv[1])):
    print("mine", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""


async def test_a_stopped_process_that_has_the_turn_is_named_and_its_end_lets_others_go_on(tmp_path, monkeypatch):
    file = tmp_path / "buffer.db"
    store = SQLStorage(file)
    command = [sys.executable, "-c", HOLDER, f"sqlite:///{file}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"mine\n"
            turns, start = [], connections.start_thread
            monkeypatch.setattr(connections, "start_thread", lambda *work: turns.append(start(*work)) or turns[-1])
            monkeypatch.setattr(connections, "LIMIT_S", 0.05)
            with pytest.raises(StoreBusy, match=r"buffer\.db-turn' locked for 0\.05 s: it hangs") as busy:
                await store.put(make_row("a"))
            # Readers never wait.
            assert len(store) == 0
        finally:
            holder.kill()
    (turn,) = turns
    await asyncio.wrap_future(turn)
    assert await store.put(make_row("b")) == 0
    assert [row.item for row in await store.get({})] == ["b"]
    store.close()
    # A client of a server is told the same.
    assert type(error_of(failure_of(1, busy.value), ERRORS)) is StoreBusy


async def test_a_put_that_is_stored_succeeds_where_the_turn_to_evict_does_not_come(tmp_path, monkeypatch, caplog):
    buffer = ReplayBuffer(FIFOReplayPolicy(), SQLStorage(tmp_path / "buffer.db"), limit=1)

    async def put(name):
        await buffer.put([RolloutState([], group_id=name, status=Status.COMPLETED)], "math")

    def busy(*_):
        raise StoreBusy("another process has kept the turn")

    await put("a")
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(writes, "evict_together", busy)
        await put("b")
    assert "more than its limit of 1 groups for now: another process" in caplog.text
    assert await buffer.count("math", Status.COMPLETED) == 2
    # The next one sees the excess of both.
    await put("c")
    ((left,),) = await buffer.get(3, "math", Status.COMPLETED)
    assert (left.group_id, buffer.num_evicted) == ("c", {"math": 2})
    await buffer.close()
