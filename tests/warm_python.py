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

The server of `multiprocessing`, from which the ranks of a trainer are forked, is forked as well: it would import
torch anew for each program of a test. Ray starts processes without `Popen`, by `warm_workers`: its workers are
asked for by `ray_worker.py`, at a socket.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import inspect
import json
import os
import runpy
import select
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
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import pytest

MAX_MESSAGE_BYTES = 190_000
MAX_DESCRIPTORS = 16
ADDRESS = "WARM_PYTHON"
"""The environment's name for a server's address."""
RAY_WORKER = str(Path(__file__).with_name("ray_worker.py"))
_Popen = subprocess.Popen
_execute_child = _Popen._execute_child  # type: ignore[attr-defined]


class Server:
    """The process that has everything imported; started when it is first needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.socket: socket.socket | None = None
        self.address = f"warm-python-{uuid.uuid4().hex}"
        """In the abstract namespace of sockets, where other processes ask."""

    def start(self, told: dict[str, Any], descriptors: list[int]) -> int:
        """Have it fork a process; its number."""
        with self.lock:
            asked = self.begin()
            socket.send_fds(asked, [json.dumps(told).encode()], descriptors)
            return int(asked.recv(100))

    def begin(self) -> socket.socket:
        """Start it, if it has not been; the socket at which it is asked."""
        if self.socket is None and ADDRESS in os.environ:
            # A program of a test: that of the test itself.
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.socket.connect(f"\0{os.environ[ADDRESS]}")
        if self.socket is None:
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listening.bind(f"\0{self.address}")
            listening.listen()
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with listening, theirs:
                given = [theirs.fileno(), listening.fileno()]
                # It ends when this process does: its socket closes.
                command = [sys.executable, __file__, *map(str, given), self.address]
                self.process = _Popen(command, pass_fds=given, start_new_session=True)
        return self.socket


SERVER = Server()


class WarmPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, whose Python programs are forked from the server."""

    _ended: int | None = None

    def _execute_child(self, *given: Any) -> None:
        asked = inspect.signature(_execute_child).bind(self, *given).arguments
        args, env = asked["args"], asked["env"]
        is_python = isinstance(args, list) and len(args) > 1 and str(args[0]) == sys.executable
        if not is_python or not (str(args[1]) in ("-c", "-m") or str(args[1]).endswith(".py")):
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


@contextmanager
def warm_python() -> Iterator[None]:
    """While open, Python programs that this process starts are forked from the server.

    So is the server of `multiprocessing`, also after it is closed.
    """
    SERVER.begin()
    fork_servers_from(os.environ.get(ADDRESS, SERVER.address))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", WarmPopen)
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
            with SERVER.lock:
                SERVER.begin()
            patch.setenv(ADDRESS, SERVER.address)
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", RAY_WORKER)
        yield


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
    load_model(folder)
    load_tokenizer(folder)


def serve(owner: socket.socket, listening: socket.socket) -> list[str]:
    """Fork for every request until the owner closes; the forked process returns its arguments."""
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
            message, descriptors, _, _ = socket.recv_fds(asked, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
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
    # Remembered from the server's environment.
    tempfile.tempdir = None
    own = [path for path in told["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *(path for path in sys.path[1:] if path not in own)]
    return told["args"]


def fork_servers_from(address: str) -> None:
    """Have the server of `multiprocessing` that this process may start forked as well, by the server at `address`.

    It would import what its own processes share, torch and transformers among it.
    """

    def start(path: Any, args: list[Any], passed: Any) -> int:
        kept = sorted(map(int, passed))
        # Not closed: what was asked for ends with who asked.
        asked = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked.connect(f"\0{address}")
        ends, status = os.pipe()
        told = {"args": args[-2:], "cwd": os.getcwd(), "env": dict(os.environ), "kept": kept, "session": False}
        socket.send_fds(asked, [json.dumps(told).encode()], [status, 0, 1, 2, *kept])
        os.close(status)
        pid = int(asked.recv(100))
        FORK_SERVERS[pid] = ends, asked
        return pid

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        if pid not in FORK_SERVERS:
            return os.waitpid(pid, options)
        return (pid, signal.SIGKILL) if select.select([FORK_SERVERS[pid][0]], [], [], 0)[0] else (0, 0)

    # The process is no child of this one: the operating system does not tell whether it is there.
    forkserver.util = types.SimpleNamespace(**vars(util) | {"spawnv_passfds": start})  # type: ignore[attr-defined]
    forkserver.os = types.SimpleNamespace(**vars(os) | {"waitpid": waitpid})  # type: ignore[attr-defined]


FORK_SERVERS: dict[int, tuple[int, socket.socket]] = {}
"""By their numbers: what tells that one has ended, and what it ends with."""


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
    *descriptors, address = sys.argv[1:]
    wanted = serve(*(socket.socket(fileno=int(number)) for number in descriptors))
    fork_servers_from(address)
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
