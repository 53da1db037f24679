"""Runs a command, and ends it with all its children when its input closes. A program, not a module.

::

    python guard.py COMMAND ...      its input is a pipe that the parent holds open
        input closed (the parent died, however it died), or SIGTERM --> SIGTERM to the command's group
            not ended after GRACE_S --> SIGKILL        --> exits with the command's exit code

A server that outlives the run that started it would keep its memory, and a GPU. Only the standard library is
used, so that a guard costs little.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0
"""The time that a server gets to say goodbye to its workers."""


def main(command: list[str]) -> int:
    """Run `command` to its end; return its exit code."""
    ending = threading.Event()
    # First: without it the signal would end this process and leave the child.
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_wait_for_input_to_close, args=(ending,), daemon=True).start()
    threading.Thread(target=_end, args=(child, ending), daemon=True).start()
    code = child.wait()
    # The child has ended; children of its own may still run.
    _signal(child, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _wait_for_input_to_close(ending: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ending.set()


def _end(child: subprocess.Popen[bytes], ending: threading.Event) -> None:
    ending.wait()
    _signal(child, signal.SIGTERM)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _signal(child, signal.SIGKILL)


def _signal(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # The group is named after its first process; it is gone once all its processes are.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
