"""What Ray starts for a worker, in place of its `setup_worker.py`: has it forked with everything imported.

::

    raylet --starts--> this file --asks--> the server of `warm_python` --fork--> the worker
                           '--- waits; each ends when the other does ------------'

Ray knows the worker by the number that it says itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys

SETUP = ("--serialized-runtime-env-context=", "--language=")
"""The options that are for `setup_worker.py`, not for the worker."""


def main(args: list[str]) -> int:
    """Have the worker with these arguments run; how it ended."""
    told = {
        "args": [arg for arg in args if not arg.startswith(SETUP)],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "kept": [],
        "session": True,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
        asked.connect("\0" + os.environ["WARM_PYTHON"])
        ends, status = os.pipe()
        socket.send_fds(asked, [json.dumps(told).encode()], [status, 0, 1, 2])
        os.close(status)
        asked.recv(100)
        code = os.waitstatus_to_exitcode(int(os.read(ends, 100) or b"9"))
    # As a shell says it: ended by a signal is no success.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
