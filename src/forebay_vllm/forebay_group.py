"""Bytes from one sender to the workers of one vLLM server, on any machine, by NCCL or gloo.

::

    sender (this program)                                  worker (`forebay_transfer`)
    listens; its place, in JSON --> who started it --HTTP--> joins: the store gives it a number
        <------- a group of both, outside of torch's own --------->
    a line: path and bytes of shared memory --> broadcast --> receive
    {"sent": bytes}, or {"error": why}, and it ends

A server has a group of its own: a lost one holds up no other, and who started its sender ends that. Nothing is
encrypted, and nothing is unpickled. Nothing of Forebay or vLLM is imported: both ends have an environment of
their own.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, and not in its list

SLICE_BYTES = 64 << 20
"""The bytes that travel at once, as the sender has it; its GPU has room for so many."""


class Group:
    """A sender, its number 0, and workers; every wait in it ends after ``place["limit_s"]`` with a RuntimeError.

    ::

        group = Group.join(place, torch.device("cuda:1"))
        data = group.receive(1 << 20)
    """

    def __init__(self, place: Mapping[str, Any], store: Any, rank: int, device: torch.device) -> None:
        """Returns once all are there, with a connection that has carried a byte."""
        is_nccl, before = place["backend"] == "nccl", os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        kind: Any = dist.ProcessGroupNCCL if is_nccl else dist.ProcessGroupGloo
        self._device = device if is_nccl else torch.device("cpu")
        options = kind.Options() if is_nccl else kind._Options()
        if is_nccl:
            # Its waits then have the limit; else torch ends a process that has lost another.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        else:
            # Left to itself, gloo takes the address of the machine's name.
            options._devices = [kind.create_device(hostname=own_address(place["host"]))]
        options._timeout = timedelta(seconds=place["limit_s"])
        self._group, self._slice_bytes = kind(store, rank, place["size"], options), int(place["slice_bytes"])
        if is_nccl and before is None:
            # Of this group alone.
            del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        # NCCL connects with the first.
        self.carry(torch.zeros(1, dtype=torch.uint8, device=self._device))

    @classmethod
    def join(cls, place: Mapping[str, Any], device: torch.device) -> "Group":
        """That of the sender at `place`, for a worker with its model on `device`."""
        limit = timedelta(seconds=place["limit_s"])
        store = PrefixStore(place["token"], TCPStore(place["host"], place["port"], None, False, limit))
        if (rank := store.add("workers", 1)) >= place["size"]:
            raise RuntimeError("the sender has all its workers: this server is another, or was started anew")
        return cls(place, store, rank, device)

    def carry(self, data: torch.Tensor) -> None:
        """Give these bytes of the sender to all workers, in place of theirs."""
        for part in data.split(self._slice_bytes):  # type: ignore[no-untyped-call]
            self._group.broadcast([part.to(self._device)], dist.BroadcastOptions()).wait()

    def receive(self, num_bytes: int) -> torch.Tensor:
        """So many bytes of the sender, on the model's device with NCCL, else on the CPU."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self.carry(data)
        return data


def own_address(host: str) -> str:
    """This machine's IPv4 address towards `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent.
        probe.connect((host, 1))
        return str(probe.getsockname()[0])


def main(server: str, num_workers: str, device: str, token: str, limit_s: str) -> None:
    """Send what the lines of the input name, until it ends, to the workers of the server on host `server`."""
    # Libraries print, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        # Left to itself, torch would listen on every interface.
        listener = socket.create_server((own_address(server), 0))
        (host, port), limit = listener.getsockname(), timedelta(seconds=float(limit_s))
        store = TCPStore(host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())
        place = {"host": host, "port": port, "token": token, "size": int(num_workers) + 1, "limit_s": float(limit_s)}
        place |= {"backend": "gloo" if device == "cpu" else "nccl", "slice_bytes": SLICE_BYTES}
        print(json.dumps(place), file=answers)
        group = Group(place, PrefixStore(token, store), 0, torch.device(device))
        for line in sys.stdin:
            path, num_bytes = json.loads(line)
            group.carry(torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8))
            print(json.dumps({"sent": num_bytes}), file=answers)
    # Whatever a library raises: who started this has to learn of it.
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
