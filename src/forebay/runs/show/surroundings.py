"""Around a run of any kind while it works: signals that end it, and the log of the package.

::

    Ctrl-C, SIGTERM --> stop after this step --a second one--> leave now, without saving
    logging of "forebay" --> lines of the display
    forebay scale        --> engines that join or leave, by a socket in the run's folder
    forebay board        --> a process beside the run, which ends with it
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from forebay.config import ConfigError
from forebay.io.address import Address, listen
from forebay.runs.folder import list_checkpoints
from forebay.runs.show.display import RunDisplay
from forebay.tracebacks import INTERRUPTED


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event, display: RunDisplay, folder: Path) -> Iterator[None]:
    """First Ctrl-C, or SIGTERM: `stop` is set, for after this step. Second: leave now, without saving."""
    if threading.current_thread() is not threading.main_thread():
        # Python gives signals to the main thread only; a loop in another thread is ended from there.
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def leave(*_: object) -> None:
        display.close()
        kept = "the last checkpoint is kept" if list_checkpoints(folder) else "no checkpoint was made yet"
        display.message(f"left at once; {kept} in {folder}")
        # An ordinary exit would wait for the threads that compute.
        os._exit(INTERRUPTED)

    def on_first() -> None:
        stop.set()
        display.interrupted()
        for number in before:
            loop.remove_signal_handler(number)
            # Not through the event loop, which may be stuck.
            signal.signal(number, leave)

    for number in before:
        loop.add_signal_handler(number, on_first)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextlib.asynccontextmanager
async def scaled_by_command(folder: Path, scale: Callable[[str], Awaitable[str]]) -> AsyncIterator[None]:
    """While open, ``forebay scale`` reaches `scale`, which is told the change and says how many there are."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = await scale((await reader.readline()).decode().strip())
        # A wrong change, no room, a part that is lost over it: the run itself has its own errors.
        except (ValueError, RuntimeError, OSError) as error:
            said = f"refused: {error}"
        writer.write(said.encode())
        writer.close()

    with _control(folder) as path, contextlib.ExitStack() as stack:
        try:
            # Only the run's user may connect to it.
            sock, _ = await listen(Address(path=path))
            stack.callback((await asyncio.start_unix_server(answer, sock=sock)).close)
            stack.callback(path.unlink, missing_ok=True)
        except OSError as error:
            logging.getLogger(__name__).info("forebay scale will not reach this run: %s", error)
        yield


_SCALED_S = 1800.0
"""A newcomer loads the weights, and a leaver ends its requests, for ten minutes each."""


def ask_to_scale(folder: Path, change: str) -> str:
    """The answer of the run that works in `folder` on this machine.

    Raises:
        ConfigError: none works there, or it refuses.
    """
    try:
        with _control(folder) as path, socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_SCALED_S)
            sock.connect(str(path))
            sock.sendall(f"{change}\n".encode())
            said = sock.makefile().read()
    except TimeoutError:
        raise ConfigError(f"the run in {str(folder)!r} has not answered in {_SCALED_S:g} s") from None
    except OSError:
        raise ConfigError(f"no run works in {str(folder)!r} here; name the folder of one that works") from None
    if said.startswith("refused: ") or not said:
        raise ConfigError(said.removeprefix("refused: ") or "the run ended meanwhile")
    return said


@contextlib.contextmanager
def _control(folder: Path) -> Iterator[Path]:
    """The socket, by the open folder: the path of a socket has a hundred characters at most."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        short = Path(f"/proc/self/fd/{opened}")
        yield (short if short.exists() else Path(os.path.relpath(folder))) / "control.sock"
    finally:
        os.close(opened)


class _DisplayHandler(logging.Handler):
    """Shows what the library logs, one line a record; of all tracebacks only the first."""

    def __init__(self, display: RunDisplay) -> None:
        super().__init__(logging.INFO)
        self._display = display
        self._traced = False

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else f"{record.getMessage()}: {error!r}"
        if record.levelno < logging.WARNING:
            self._display.message(text)
            return
        self._display.warning(text)
        if error is not None and not self._traced:
            self._traced = True
            self._display.traceback(error)


@contextlib.contextmanager
def logs_shown(display: RunDisplay) -> Iterator[None]:
    """Show the log of the package on `display`, for as long as the run lasts."""
    logger, handler = logging.getLogger("forebay"), _DisplayHandler(display)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def board_beside(folder: Path, display: RunDisplay) -> Iterator[None]:
    """``forebay board`` of the run in `folder`, in a process of its own, while open; its address is shown.

    It ends when its standard input does: also when this process is killed.
    """
    start = "from forebay.cli import main; main()"
    command = [sys.executable, "-c", start, "board", str(folder), "--beside"]
    # In a session of its own: Ctrl-C in the terminal is for the run, which ends the board itself.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as board:
        assert board.stdin is not None
        assert board.stdout is not None
        loop, lines = asyncio.get_running_loop(), board.stdout

        def say_where() -> None:
            # Its first line, once it serves. None: it could not, and said why on standard error.
            if line := lines.readline().strip():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(display.message, line)

        reader = threading.Thread(target=say_where, name="board", daemon=True)
        reader.start()
        try:
            yield
        finally:
            board.terminate()
            board.stdin.close()
            reader.join()


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends at once what does not await anything; the event loop's own handler would wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
