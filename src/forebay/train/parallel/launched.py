"""Processes that torchrun or srun started side by side: the first makes the run, the others are its ranks.

::

    process 0 --its address, a token--> torch's store --> process r: connects twice, proves the token
        Beside: the connections                               answers calls until they end
        rank 0 is a child of its own                          rank r

None of them can be started again alone: a lost rank ends the run, and the end of the run ends every rank.
"""

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in its list

from forebay.config import ConfigError
from forebay.io.address import is_proof, prove, tune
from forebay.io.elsewhere import files_to_see
from forebay.train.parallel import ranks
from forebay.train.parallel.array_messages import connect, receive, send
from forebay.train.parallel.place import Place
from forebay.train.parallel.ranks import LOOPBACK, LocalRanks, Rank, RankError

HELLO_LIMIT_S = 10.0
"""A stranger who connects and says nothing holds up the others for so long."""


class Beside:
    """The processes beside the first one; they end when it is closed, or its process is gone."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._home = LOOPBACK if place.num_here == place.size else _own_address(place)
        self._joined = [Rank([], 0, "") for _ in range(1, place.size)]
        self._ranks: LocalRanks | None = None

    def meet(self) -> None:
        """Wait for all of them.

        Raises:
            RankError: one has not come within the limit for the start of ranks.
        """
        size, token = self._place.size, secrets.token_hex(16)
        deadline_s = time.monotonic() + ranks.START_LIMIT_S
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server((self._home, 0), backlog=2 * size))
            store = _store(self._place)
            store.set("forebay", f"{self._home} {listener.getsockname()[1]} {token}")
            # torchrun keeps its store when it starts all again, and ranks would look for this process.
            stack.callback(store.delete_key, "forebay")
            while missing := [n for n, rank in enumerate(self._joined, 1) if len(rank.channels) < 2]:
                listener.settimeout(max(0.01, deadline_s - time.monotonic()))
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    raise RankError(
                        f"{ranks.numbers(missing)} of {size} did not come within {ranks.START_LIMIT_S:g} s; "
                        f"the output of each may say why"
                    ) from None
                tune(sock)
                self._welcome(sock, token)

    def _welcome(self, sock: socket.socket, token: str) -> None:
        channel, nonce = connect(sock, HELLO_LIMIT_S), secrets.token_bytes(16)
        try:
            send(channel, nonce)
            number, gpu, proof = receive(channel)
            if not is_proof(proof, token, nonce):
                raise ValueError("it does not know the token")
        # Whatever it is, it is none of them.
        except Exception:
            channel.close()
            return
        sock.settimeout(ranks.START_LIMIT_S)
        channels = [*self._joined[number - 1].channels, channel]
        self._joined[number - 1] = Rank(channels, gpu, sock.getpeername()[0])

    def ranks(self, device: str, folder: Path, model_folder: Path) -> LocalRanks:
        """The ranks of every trainer of the run in `folder`; on ``cuda`` each has the GPU of its place.

        Raises:
            ConfigError: one does not see that folder, or the model's.
        """
        if self._ranks is None:
            self._ranks = LocalRanks(
                self._place.size,
                device=torch.device(device).type,
                threads=max(1, torch.get_num_threads() // self._place.num_here),
                limit_s=ranks.SILENCE_LIMIT_S,
                joined=self._joined,
                home=self._home,
            )
            with files_to_see(folder, model_folder) as sizes:
                paths = self._ranks.call("missing", [[sizes]] * self._place.size)
            for number, path in enumerate(paths):
                if path is not None:
                    raise ConfigError(
                        f"rank {number} does not see the folder {os.path.dirname(path)!r} as the run does: mount "
                        f"it on its machine under the same path, or name another"
                    )
        return self._ranks

    def close(self) -> None:
        """End them."""
        if self._ranks is not None:
            self._ranks.close()
        for rank in self._joined:
            rank.close()


beside: Beside | None = None
"""Those of this process, if it is the first of several, inside `joined`."""


@contextmanager
def joined(place: Place) -> Iterator[None]:
    """In the first process the others are there inside; any other is a rank until the run ends, and leaves.

    Raises:
        RankError: one of them did not come, or there is no first one.
    """
    global beside
    if place.rank:
        _serve(place)
        sys.exit()
    beside = Beside(place)
    try:
        beside.meet()
        yield
    finally:
        beside.close()
        beside = None


def _serve(place: Place) -> None:
    # In the store no Python runs that could handle a signal.
    _on_signals(signal.SIG_DFL)
    try:
        host, port, token = _store(place).get("forebay").decode().split()
        channels = []
        for _ in range(2):
            sock = socket.create_connection((host, int(port)), HELLO_LIMIT_S)
            tune(sock)
            channels.append(channel := connect(sock, ranks.START_LIMIT_S))
            send(channel, [place.rank, place.gpu, prove(token, receive(channel))])
            sock.settimeout(None)
    # Those of the store are of torch's own kind, and many lines long.
    except (RuntimeError, OSError, EOFError) as error:
        why = str(error).partition("\n")[0]
        raise RankError(f"rank {place.rank} found no run by {place.host}:{place.port}: {why}") from None
    # They reach every process: the run finishes its step, for which it needs the ranks, and ends them.
    _on_signals(signal.SIG_IGN)
    ranks.serve(channels)


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _store(place: Place) -> TCPStore:
    limit, is_master = timedelta(seconds=ranks.START_LIMIT_S), place.rank == 0 and not place.has_store
    is_here = place.num_here == place.size and not place.has_store
    # Left to itself, torch would listen on every interface.
    listener = socket.create_server((LOOPBACK, place.port)).detach() if is_master and is_here else None
    host = LOOPBACK if is_here else place.host
    return TCPStore(host, place.port, None, is_master, limit, wait_for_workers=False, master_listen_fd=listener)


def _own_address(place: Place) -> str:
    """The address of this machine towards the one with the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect((place.host, place.port))
        return str(probe.getsockname()[0])
