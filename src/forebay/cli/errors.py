"""Around the work of every command: errors become one message, signals one clear end.

::

    with one_message():  work
        an error that a person can mend --> "error: ..." on stderr, exit status 2
        Ctrl-C, SIGTERM                 --> "stopped" on stderr, exit status 130
        anything else is a bug here, and keeps its traceback
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal, NoReturn

from rich.console import Console
from rich.text import Text

from forebay.config import ConfigError
from forebay.extras import MissingLibraryError, missing
from forebay.io.durable import is_disk_error
from forebay.tracebacks import INTERRUPTED, first_error

MARKUP: Literal["rich", None] = "rich" if sys.stdout.isatty() and sys.stderr.isatty() else None
"""How typer shows help and wrong usage: boxes of 80 columns are for a terminal; a pipe gets plain lines."""
FAILED = 2

_MENDABLE = {
    "forebay.io.durable": "DiskError",
    "forebay.engines.base": "EngineLost",
    "forebay.environments.workers.messages": "WorkerError",
    "forebay.produce.strategies.pending": "ProductionError",
    "forebay.runs.placement": "PartLost",
    "forebay.runs.verify": "WeightsDifferError",
    "forebay.watching.stalls": "StallError",
    "forebay.train.objective.guard": "OffPolicyError",
    "sqlalchemy.exc": "SQLAlchemyError",
}
"""Errors whose message says what to do, by the module that defines them. One that was never imported has
raised nothing, so none is imported for this."""


@contextmanager
def one_message(*also: type[Exception]) -> Iterator[None]:
    """Run a command's work inside; `also` are further errors whose message is all that a person needs."""
    # Set before transformers is imported: its progress bars and warnings would tear the display.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    before = signal.signal(signal.SIGTERM, _as_ctrl_c)
    try:
        yield
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "forebay":
            raise
        fail(str(error) if isinstance(error, MissingLibraryError) else str(missing(error.name or "", "this")))
    except Exception as error:
        first = first_error(error)
        if not _is_mendable(first, also):
            raise
        fail(_said(first))
    finally:
        signal.signal(signal.SIGTERM, before)


def fail(message: str) -> NoReturn:
    """Print the error, whose text may come from a file or a database, and leave."""
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in message.split("\n"))
    say(Text.assemble(("error: ", "bold red"), "\n".join(lines)))
    sys.exit(FAILED)


def say(message: str | Text) -> None:
    """A line on stderr: as it is, not broken into pieces of a terminal's width."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    console.print(message, soft_wrap=True)


def _as_ctrl_c(signal_number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


def _is_mendable(error: BaseException, also: tuple[type[Exception], ...]) -> bool:
    if isinstance(error, (ConfigError, FloatingPointError, *also)):
        return True
    if is_disk_error(error) or (isinstance(error, OSError) and error.errno in (errno.EISDIR, errno.EMFILE)):
        return True
    known = (getattr(sys.modules.get(module), name, None) for module, name in _MENDABLE.items())
    return any(isinstance(error, kind) for kind in known if isinstance(kind, type))


def _said(error: BaseException) -> str:
    if type(error).__module__.startswith("sqlalchemy."):
        # It goes on with the statement and its values.
        return f"the database says: {str(error).splitlines()[0]}"
    if isinstance(error, OSError) and error.strerror is not None:
        place = "" if error.filename is None else f": {str(error.filename)!r}"
        return f"{error.strerror}{place}"
    return str(error)
