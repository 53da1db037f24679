"""How failures are told: where a user's own code raised, and the exit status after Ctrl-C."""

import os
import signal
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

INTERRUPTED = 130
"""Exit status that shells report for a program that Ctrl-C ended."""

_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = ("<", *(os.path.join(path, "") for path in [str(Path(__file__).parent), *_LIBRARIES]))
"""Prefixes of the files of Forebay, of installed packages, of the standard library and of no file. Code that
fails in there was usually called wrongly from the user's code."""


def first_error(error: BaseException) -> BaseException:
    """The error that a group of errors began with: the others only ended because of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def raised_at(error: BaseException) -> str | None:
    """The last frame in a user's own code, as ``FILE, line N``; None if the error has passed through none."""
    # Without source lines, which would be looked up in the files and are not used here.
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    for frame in reversed(frames):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}, line {frame.lineno}"
    return None


@contextmanager
def left_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, with one line: for loading libraries, some of which swallow an interrupt.

    Not where somebody else decides what it does: `nohup` ignores it, and a program's thread cannot say.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def leave(*_: object) -> None:
        os.write(2, b"stopped\n")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
