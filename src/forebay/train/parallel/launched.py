"""Processes that torchrun or srun started side by side: the first makes the run, the others are its ranks.

::

    process 0 --its address, a token--> torch's store --> process r: connects twice, proves the token
        Beside: the connections                               answers calls until they end
        rank 0 is a child of its own                          rank r

None of them can be started again alone: a lost rank ends the run, and the end of the run ends every rank.
"""

from __future__ import annotations

import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, and not in its list

from forebay.config import ConfigError
from forebay.io.address import is_loopback, is_proof, prove, tune
from forebay.io.channel import BlockingChannel
from forebay.train.parallel import ranks
from forebay.train.parallel.array_messages import connect, receive, send
from forebay.train.parallel.place import Place
from forebay.train.parallel.ranks import LOOPBACK, LocalRanks, Rank, RankError

HELLO_LIMIT_S = 10.0
"""A stranger who connects and says nothing holds up the others for so long."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEY = "forebay"


class Beside:
    """The processes beside the first one, once all are there; they end when it is closed, or is gone.

    Raises:
        RankError: one has not come within the limit for the start of ranks.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._ranks: LocalRanks | None = None
        self._found: dict[tuple[int, int], BlockingChannel] = {}
        self._gpus: dict[int, int] = {}
        with ExitStack() as begun:
            begun.callback(self.close)
            self._meet()
            begun.pop_all()

    def ranks(self, device: str, folder: Path) -> LocalRanks:
        """The ranks of every trainer of the run in `folder`; on ``cuda`` each has the GPU of its place.

        Raises:
            ConfigError: one does not see the folder.
        """
        if self._ranks is None:
            firsts = {rank: self._found[rank, 0].sock for rank in sorted(self._gpus)}
            ours = [sock.getsockname()[0] for sock in firsts.values()]
            # A connection within this machine may go over its loopback.
            home = next((address for address in ours if not is_loopback(address)), LOOPBACK)
            joined = []
            for rank, sock in firsts.items():
                address = sock.getpeername()[0]
                channels = [self._found[rank, lane] for lane in (0, 1)]
                joined.append(Rank(channels, self._gpus[rank], home if is_loopback(address) else address))
            self._ranks = LocalRanks(
                self.place.size,
                device=torch.device(device).type,
                threads=max(1, torch.get_num_threads() // self.place.num_here),
                limit_s=ranks.SILENCE_LIMIT_S,
                joined=joined,
                home=home,
            )
            # A file made just now: a machine may have a folder of this name with an earlier run.
            with tempfile.NamedTemporaryFile(dir=folder.absolute(), prefix=".seen-") as seen:
                sees = self._ranks.call("sees", [[seen.name]] * self.place.size)
            if not all(sees):
                raise ConfigError(
                    f"rank {sees.index(False)} does not see the folder {str(folder.absolute())!r} as this "
                    f"machine does: mount it on its machine under the same path, or name another output"
                )
        return self._ranks

    def close(self) -> None:
        """End them."""
        if self._ranks is not None:
            self._ranks.close()
        for channel in self._found.values():
            channel.close()

    def _meet(self) -> None:
        place, token = self.place, secrets.token_hex(16)
        deadline_s = time.monotonic() + ranks.START_LIMIT_S
        address = LOOPBACK if place.is_whole else _own_address(place)
        # A machine's own name may lead to its loopback, where others do not find it.
        bound, told = (address, address) if place.is_whole or not is_loopback(address) else ("", place.host)
        with socket.create_server((bound, 0), backlog=2 * place.size) as listener:
            store = _store(place)
            store.set(_KEY, f"{told} {listener.getsockname()[1]} {token}")
            while len(self._found) < 2 * (place.size - 1):
                listener.settimeout(max(0.01, deadline_s - time.monotonic()))
                try:
                    channel = connect(listener.accept()[0], HELLO_LIMIT_S)
                except TimeoutError:
                    missing = set(range(1, place.size)) - {rank for rank, _ in self._found}
                    raise RankError(
                        f"{ranks.numbers(missing)} of {place.size} did not come within "
                        f"{ranks.START_LIMIT_S:g} s; the output of each may say why"
                    ) from None
                nonce = secrets.token_bytes(16)
                try:
                    send(channel, nonce)
                    rank, lane, gpu, proof = receive(channel)
                    known = is_proof(proof, token, nonce)
                # Whatever it is, it is none of them.
                except Exception:
                    known = False
                if not known:
                    channel.close()
                    continue
                tune(channel.sock)
                self._found[rank, lane], self._gpus[rank] = channel, gpu


beside: Beside | None = None
"""Those of this process, while `joined` has it make a run."""


@contextmanager
def joined(place: Place) -> Iterator[Beside | None]:
    """In the first process the others are there meanwhile; any other is a rank first, and then gets None.

    Raises:
        RankError: one of them did not come, or there is no first one.
    """
    global beside
    if place.rank:
        _serve(place)
        yield None
        return
    beside = Beside(place)
    try:
        yield beside
    finally:
        beside.close()
        beside = None


def _serve(place: Place) -> None:
    """Be a rank until the run has ended."""
    # Waiting for the store is no work of Python's, which would not come to handle a signal.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    try:
        host, port, token = _store(place).get(_KEY).decode().split()
        channels = []
        for lane in (0, 1):
            sock = socket.create_connection((host, int(port)), HELLO_LIMIT_S)
            tune(sock)
            channels.append(channel := connect(sock, ranks.START_LIMIT_S))
            send(channel, [place.rank, lane, place.gpu, prove(token, receive(channel))])
            sock.settimeout(None)
    # The store's errors are those of torch's own kind, and of many lines.
    except (RuntimeError, OSError, EOFError) as error:
        why = str(error).splitlines()[0]
        raise RankError(f"rank {place.rank} found no run by {place.host}:{place.port}: {why}") from None
    # They reach all processes: the run finishes its step, for which it needs the ranks, and ends them.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ranks.serve(channels)


def _store(place: Place) -> TCPStore:
    return TCPStore(
        place.host,
        place.port,
        is_master=place.rank == 0 and not place.has_store,
        timeout=timedelta(seconds=ranks.START_LIMIT_S),
        wait_for_workers=False,
    )


def _own_address(place: Place) -> str:
    """The address of this machine towards the one with the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect((place.host, place.port))
        return str(probe.getsockname()[0])
