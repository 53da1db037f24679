"""Where servers listen: every address of a name is tried, and a server removes only its own socket."""

import asyncio
import fcntl
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from forebay.io import address as addresses
from forebay.io.address import Address, dial, listen
from forebay.io.link import Acceptor


@pytest.mark.parametrize("closed", ["127.0.0.2", "::1"])
async def test_every_address_of_a_name_is_tried(monkeypatch, closed):
    listener, address = await listen(Address.parse("tcp://127.0.0.1:0"))
    answers = [
        (socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, address.port))
        for host in (closed, "127.0.0.1")
    ]

    async def resolve(*_, **__):
        return answers

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    with listener:
        with await dial(Address(host="somewhere", port=address.port)) as sock:
            assert sock.getpeername()[0] == "127.0.0.1"
        del answers[1]
        with pytest.raises(OSError, match=r"\[Errno"):
            await dial(Address(host="somewhere", port=address.port))


async def test_a_server_that_stops_leaves_the_socket_of_the_next_one(tmp_path):
    path = tmp_path / "socket"

    async def serve(sock):
        pass

    first = Acceptor((await listen(Address(path)))[0], serve, path)
    path.unlink()
    second = Acceptor((await listen(Address(path)))[0], serve, path)
    await first.close()
    (await dial(Address(path))).close()
    await second.close()
    assert not path.exists()


def test_of_two_servers_that_start_at_once_over_a_left_over_socket_one_listens(tmp_path, monkeypatch):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    both, unlink = threading.Barrier(2), Path.unlink
    found = []

    def start():
        try:
            found.append(asyncio.run(listen(Address(path)))[0])
        except OSError as error:
            found.append(str(error))

    def unlink_together(self, **options):
        # Where nothing keeps them apart, both have found the socket unused by now.
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)
        unlink(self, missing_ok=True)

    monkeypatch.setattr(Path, "unlink", unlink_together)
    servers = [threading.Thread(target=start) for _ in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    (listening,) = (each for each in found if isinstance(each, socket.socket))
    (refused,) = (each for each in found if isinstance(each, str))
    assert "another server listens there" in refused
    with listening, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


async def test_a_folder_that_another_program_keeps_locked_is_listened_in(tmp_path, monkeypatch):
    monkeypatch.setattr(addresses, "RETRY_S", 0.001)
    kept = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(kept, fcntl.LOCK_EX)
    listening = asyncio.create_task(listen(Address(tmp_path / "socket")))
    # The event loop goes on meanwhile.
    await asyncio.sleep(0.001)
    assert not listening.done()
    sock, _ = await listening
    os.close(kept)
    with sock:
        (await dial(Address(tmp_path / "socket"))).close()


async def test_a_folder_that_may_be_written_and_not_read_is_listened_in(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, *options, **named):
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *options, **named)

    monkeypatch.setattr(os, "open", refuse)
    sock, _ = await listen(Address(tmp_path / "socket"))
    with sock:
        (await dial(Address(tmp_path / "socket"))).close()
