"""Around the work of every command: errors become one message, signals one clear end.

::

    with one_message():  work
        an error that a person can mend --> "error: ..." on stderr, exit status 2
        Ctrl-C, SIGTERM                 --> "stopped" on stderr, exit status 130
        one of the user's own code      --> the same, with its file and line
        anything else is a bug here, and keeps its traceback
"""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, Literal, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from forebay.config import ConfigError
from forebay.extras import MissingLibraryError, missing
from forebay.io.safe_files import is_disk_error
from forebay.tracebacks import INTERRUPTED, first_error, raised_at

MARKUP: Literal["rich", None] = "rich" if sys.stdout.isatty() and sys.stderr.isatty() else None
"""How typer shows help and wrong usage: boxes of 80 columns are for a terminal; a pipe gets plain lines."""
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it: train.lr=1e-4, tasks.0.weight=2.")
]
"""The last arguments of every command that takes a run file."""
PIPED_WIDTH = 160
"""Columns when the output is no terminal; a table of groups fits."""
FAILED = 2
Given = ParamSpec("Given")

_MENDABLE = {
    "forebay.io.safe_files": "DiskError",
    "forebay.engines.base": "EngineLost",
    "forebay.environments.workers.messages": "WorkerError",
    "forebay.produce.strategies.pending": "ProductionError",
    "forebay.runs.placement": "PartLost",
    "forebay.runs.verify": "WeightsDifferError",
    "forebay.watching.stalls": "StallError",
    "forebay.train.objective.guard": "OffPolicyError",
    "forebay.train.parallel.ranks": "RankError",
    "sqlalchemy.exc": "SQLAlchemyError",
    "torch": "OutOfMemoryError",
}
"""Errors whose message says what to do, by the module that defines them. One that was never imported has
raised nothing, so none is imported for this."""


@contextmanager
def one_message(*also: type[Exception]) -> Iterator[None]:
    """Run a command's work inside; `also` are further errors whose message is all that a person needs."""
    # Set before transformers is imported: its progress bars and warnings would tear the display.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # SIGTERM, which schedulers send, ends a command as Ctrl-C does: what is open is closed.
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
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
        known = [getattr(sys.modules.get(module), name, None) for module, name in _MENDABLE.items()]
        mendable = (ConfigError, FloatingPointError, *also, *(kind for kind in known if kind is not None))
        cannot_open = isinstance(first, OSError) and first.errno in (errno.EISDIR, errno.EMFILE)
        message = str(first)
        if not (isinstance(first, mendable) or is_disk_error(first) or cannot_open):
            if (place := raised_at(first)) is None:
                raise
            message = f"{type(first).__name__}: {first} ({place})"
        elif type(first).__module__.startswith("sqlalchemy."):
            # It goes on with the statement and its values.
            message = f"the database says: {message.splitlines()[0]}"
        elif type(first).__name__ == "OutOfMemoryError":
            message += ". A smaller train.token_budget, or train.gradient_checkpointing=true, needs less: docs/gpu.md"
        elif isinstance(first, OSError) and first.strerror is not None:
            message = first.strerror + ("" if first.filename is None else f": {str(first.filename)!r}")
        fail(message)
    finally:
        signal.signal(signal.SIGTERM, before)


def in_one_message(work: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """A command whose work is `work`; wrong values and files are one message, too."""

    @wraps(work)
    def command(*arguments: Given.args, **options: Given.kwargs) -> None:
        with one_message(ValueError, OSError):
            asyncio.run(work(*arguments, **options))

    return command


def console() -> Console:
    """Stdout, with text as it is: no markup, no emoji codes, no colors for what looks like a number."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(markup=False, emoji=False, highlight=False, width=width)


def fail(message: str) -> NoReturn:
    """Print the error, whose text may come from a file or a database, and leave."""
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in message.split("\n"))
    say(Text.assemble(("error: ", "bold red"), "\n".join(lines)))
    sys.exit(FAILED)


def say(message: str | Text) -> None:
    """A line on stderr: as it is, not broken into pieces of a terminal's width."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    console.print(message, soft_wrap=True)
