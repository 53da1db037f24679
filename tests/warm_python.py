"""Python processes that need not import torch again: forked from one that has, else as `Popen` makes them.

::

    warm_python(): subprocess.Popen([sys.executable, "-c" | "-m" | file.py, ...])
                       | arguments, folder, environment, descriptors
                       v
                   this file as a program, everything imported --fork--> the process: its own number, group,
                       |                                                 descriptors, modules, end
                       '--- how it ended --> poll(), wait()

A fresh interpreter takes five seconds of CPU to import torch and transformers, and the suite starts more than
a hundred. What is forked is a process like any other: it is killed, stopped and waited for in the same way.
Tests of what is imported, or of what the death of a parent does, start theirs the usual way.

Two libraries start processes without `Popen`: Ray its workers (`warm_workers`), and multiprocessing the fork server
of a trainer's ranks (`warm_fork_servers`). Both start `stand_in.py` for it, which asks for the process at a socket.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import inspect
import io
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

MAX_MESSAGE_BYTES = 190_000
MAX_DESCRIPTORS = 16
ADDRESS = "WARM_PYTHON"
"""The environment's name for a server's address."""
STAND_IN = str(Path(__file__).with_name("stand_in.py"))
START_OWN = util.spawnv_passfds
"""How multiprocessing itself starts its fork server."""
_Popen = subprocess.Popen
_execute_child = _Popen._execute_child  # type: ignore[attr-defined]


class Server:
    """The process that has everything imported; started when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.socket: socket.socket | None = None
        self.is_origin = False
        """This process was forked from it, and asks at its address alone."""
        self.address = f"warm-python-{uuid.uuid4().hex}"
        """In the abstract namespace of sockets, where other processes ask."""

    def start(self, told: dict[str, Any], descriptors: list[int]) -> int:
        """Have it fork a process; its number."""
        with self.lock:
            asked = self.begin()
            socket.send_fds(asked, [json.dumps(told).encode()], descriptors)
            return int(asked.recv(100))

    def begun(self) -> str:
        """Its address, once it has been started."""
        with self.lock:
            if not self.is_origin:
                self.begin()
            return self.address

    def begin(self) -> socket.socket:
        """Start it, if it has not been; the socket at which it is asked."""
        if self.socket is None and ADDRESS in os.environ:
            # A program of a test: that of the test itself.
            self.address = os.environ[ADDRESS]
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.socket.connect(f"\0{self.address}")
        if self.socket is None:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listening.bind(f"\0{self.address}")
            listening.listen()
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with listening, theirs:
                given = [theirs.fileno(), listening.fileno()]
                # It ends when this process does: its socket closes.
                command = [sys.executable, __file__, *map(str, given)]
                self.process = _Popen(command, pass_fds=given, start_new_session=True)
        return self.socket


SERVER = Server()


class WarmPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, whose Python programs are forked from the server."""

    _ended: int | None = None

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(_execute_child).bind(self, *given).arguments
        args, env = asked["args"], asked["env"]
        if not is_program(args):
            _execute_child(self, *given)
            return
        ends, status = os.pipe()
        kept = [int(number) for number in asked["pass_fds"]]
        pipes = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        standard = [own if number == -1 else number for own, number in enumerate(pipes)]
        told = {
            "args": [str(arg) for arg in args[1:]],
            "cwd": str(asked["cwd"] or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "kept": kept,
            "session": bool(asked["start_new_session"]),
        }
        self.pid = SERVER.start(told, [status, *standard, *kept])
        os.close(status)
        self._ended, self._child_created = ends, True
        weakref.finalize(self, os.close, ends)
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in names))  # type: ignore[attr-defined]

    def _look(self, timeout_s: float | None) -> bool:
        """Whether it has ended within `timeout_s`."""
        assert self._ended is not None
        if self.returncode is None and not select.select([self._ended], [], [], timeout_s)[0]:
            return False
        # Several threads may wait for it.
        with SERVER.lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(int(os.read(self._ended, 100) or b"9"))
        return True

    def _internal_poll(self, *given: Any, **options: Any) -> int | None:
        if self._ended is None:
            return super()._internal_poll(*given, **options)  # type: ignore[misc]
        return self.returncode if self._look(0) else None

    def _wait(self, timeout: float | None) -> int:
        if self._ended is None:
            return super()._wait(timeout)  # type: ignore[misc]
        if not self._look(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


class StandInPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of the server's processes, whose children have to outlive them: see `stand_in`."""

    def __init__(self, args: Any, *others: Any, **options: Any) -> None:
        if type(self) is StandInPopen and is_program(args):
            args = stand_in(args[1:], options.get("pass_fds", ()))
        super().__init__(args, *others, **options)


def is_program(args: Any) -> bool:
    """Whether it is the command of a Python program, without options for the interpreter."""
    is_python = isinstance(args, list) and len(args) > 1 and str(args[0]) == sys.executable
    return is_python and (str(args[1]) in ("-c", "-m") or str(args[1]).endswith(".py"))


@contextmanager
def warm_python() -> Iterator[None]:
    """While open, Python programs that this process starts are forked from the server.

    Those of asyncio have a stand-in, which takes their place for `os.kill`, but not for SIGSTOP.
    """
    start = asyncio.create_subprocess_exec

    async def start_warm(*args: Any, **options: Any) -> Any:
        command = list(map(str, args))
        if is_program(command):
            args = stand_in(command[1:], options.get("pass_fds", ()))
        return await start(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmPopen)
        patch.setattr(asyncio, "create_subprocess_exec", start_warm)
        yield


@contextmanager
def warm_workers() -> Iterator[None]:
    """While open, a cluster of Ray that this process starts has workers that are forked from the server.

    They stay so after it is closed.
    """
    from ray._private import ray_constants

    with pytest.MonkeyPatch.context() as patch:
        # A program of a test, which a process with a server of its own has started.
        if ADDRESS not in os.environ:
            patch.setenv(ADDRESS, SERVER.begun())
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", STAND_IN)
        yield


def stand_in(args: Sequence[Any], kept: Sequence[int] = ()) -> list[str]:
    """The command of a child that stands for the Python program with these arguments, forked from the server.

    It is handed on the descriptors `kept`. A SIGKILL ends both, other signals that end a process are handed on, and
    the end of who started it is seen by neither.
    """
    told = ",".join(map(str, [SERVER.begun(), *kept]))
    # Without the environment's folders and the site's packages it starts in no time.
    return [sys.executable, "-ES", STAND_IN, f"--from={told}", *map(str, args)]


def interpreter(folder: Path) -> str:
    """A program in `folder` to take for the interpreter, whose programs are forked from the server."""
    program = folder / "warm_python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(stand_in([]))} "$@"\n')
    program.chmod(0o755)
    return str(program)


def warm_fork_servers() -> None:
    """From now on the fork server of multiprocessing is forked from the server, here and in the server's processes."""

    def start(path: Any, args: list[Any], kept: list[int]) -> int:
        """As `multiprocessing.util.spawnv_passfds`."""
        if "from multiprocessing.forkserver import main" in str(args[-1]):
            args = stand_in(["-c", args[-1]], kept)
        return START_OWN(path, args, kept)  # type: ignore[no-any-return]

    util.spawnv_passfds = start  # type: ignore[attr-defined]


def import_all() -> None:
    """What most programs of the suite import, and what a model imports when it is first used.

    Not Ray, which reads a worker's environment when it is imported.
    """
    import peft  # noqa: F401

    import forebay.cli.commands
    import forebay.engines.process.child
    import forebay.runs.launch  # noqa: F401
    from forebay.models import ModelConfig, load_model, load_tokenizer, resolve_model

    folder = resolve_model(ModelConfig(source="tiny"), seed=0)
    # It draws its progress; that a run does not is a test's to see.
    with contextlib.redirect_stderr(io.StringIO()):
        load_model(folder)
    load_tokenizer(folder)


def serve(owner: socket.socket, listening: socket.socket) -> list[str]:
    """Fork for every request until the owner closes; the forked process returns its arguments."""
    SERVER.is_origin, SERVER.address = True, listening.getsockname()[1:].decode()
    warm_fork_servers()
    statuses: dict[int, int] = {}
    begun: dict[socket.socket, list[int]] = {owner: []}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([woken, listening, *begun], [], [])
        if woken in ready:
            os.read(woken, 1000)
            for pid in list(statuses):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    with contextlib.suppress(BrokenPipeError):  # nobody may be left to read it
                        os.write(ends := statuses.pop(pid), str(status).encode())
                    os.close(ends)
        if listening in ready:
            begun[listening.accept()[0]] = []
        for asked in begun.keys() & set(ready):
            try:
                message, descriptors, _, _ = socket.recv_fds(asked, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
            except ConnectionResetError:  # it was killed before it read its answer
                message = b""
            if not message:
                if asked is owner:
                    os._exit(0)
                # One that asked at the socket has ended, and what it asked for ends with it.
                for pid in begun.pop(asked):
                    if pid in statuses:
                        os.kill(pid, signal.SIGKILL)
                asked.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (listening, *begun):
                    each.detach()
                return become(json.loads(message), descriptors)
            begun[asked].append(pid)
            statuses[pid], *others = descriptors
            for number in others:
                os.close(number)
            with contextlib.suppress(BrokenPipeError):  # who was killed since is seen to have ended
                asked.send(str(pid).encode())


def become(told: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Take over descriptors, folder, environment and search path; the arguments."""
    _, *passed = descriptors
    wanted = [0, 1, 2, *told["kept"]]
    # Out of the way first: one's number may be another's place.
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 500) for number in passed]
    for number, place in zip(high, wanted, strict=True):
        os.dup2(number, place)
    kept = sorted(set(wanted))
    for low, next_kept in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, min(next_kept, 4096))
    if told["session"]:
        os.setsid()
    is_unbuffered = bool(told["env"].get("PYTHONUNBUFFERED"))
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        errors = "backslashreplace" if number == 2 else None
        stream = open(number, mode, errors=errors, closefd=False)  # noqa: SIM115
        stream.reconfigure(line_buffering=number == 2, write_through=is_unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    subprocess.Popen = StandInPopen  # type: ignore[misc]
    # Remembered from the server's environment.
    tempfile.tempdir = None
    own = [path for path in told["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *(path for path in sys.path[1:] if path not in own)]
    return told["args"]


def run(args: list[str]) -> None:
    """What the interpreter would: ``-c code``, ``-m module`` or a file, with its arguments."""
    sys.orig_argv = [sys.executable, *args]
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    elif args[0] == "-m":
        sys.argv = args[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(args[0], run_name="__main__")


def leave(code: int) -> None:
    """As the interpreter does at its end, but for freeing all that was imported: a second of CPU."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    import_all()
    # A forked process's collections would visit, and so copy, all of that.
    gc.collect()
    gc.freeze()
    wanted = serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    try:
        run(wanted)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        leave(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)
