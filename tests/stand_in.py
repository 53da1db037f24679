"""Stands for a Python process that it has the server of `warm_python` fork, for who waits for a child of its own.

::

    Ray, multiprocessing, asyncio --starts--> this file --asks--> the server --fork--> the process
                                                  '--- waits; each ends as the other does ----'

Ray starts it in place of its `setup_worker.py`, and knows the worker by the number that it says itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

FROM = "--from="
"""The option with the server's address and the numbers of the descriptors to hand on; Ray's workers have none."""
SETUP = ("--serialized-runtime-env-context=", "--language=")
"""The options that are for `setup_worker.py`, not for the worker."""


def main(args: list[str]) -> int:
    """Have the process with these arguments run; its status as `waitpid` says it."""
    address, *kept = (
        args.pop(0).removeprefix(FROM).split(",") if args[0].startswith(FROM) else [os.environ["WARM_PYTHON"]]
    )
    is_fork_server = "multiprocessing.forkserver" in args[-1]
    if is_fork_server:
        # As that does itself, once it runs: signals to the group are for the run.
        os.setpgrp()
    told = {
        "args": [arg for arg in args if not arg.startswith(SETUP)],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "kept": [int(number) for number in kept],
        "session": not is_fork_server,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect(f"\0{address}")
        ends, status = os.pipe()
        socket.send_fds(asked, [json.dumps(told).encode()], [status, 0, 1, 2, *told["kept"]])
        # The other process alone holds what it was given.
        for number in (0, status, *told["kept"]):
            os.close(number)
        pid = int(asked.recv(100))

        def hand_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, hand_on)
        return int(os.read(ends, 100) or b"9")


if __name__ == "__main__":
    code = os.waitstatus_to_exitcode(main(sys.argv[1:]))
    if code < 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # Nothing is left to be done, and the descriptors are closed.
    os._exit(code)
