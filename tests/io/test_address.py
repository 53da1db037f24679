"""Where servers listen: every address of a name is tried, and a server removes only its own socket."""

import asyncio
import socket

import pytest

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
