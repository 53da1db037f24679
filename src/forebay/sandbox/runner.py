"""Runs programs in the strongest isolation that the machine offers, and ends everything they started.

It is not a virtual machine: the kernel is shared, and a program that finds a hole in it gets out.

::

    run(command) -> first run: which of the `levels` works here? none -> SandboxUnavailableError
        |
        v waits for one of max_concurrent slots
    start -> the process ends            --> kill what it left behind --> outputs, cut to their limit
               | wall_s over, cancelled                ^
               v                                       |
             kill the process tree --------------------+

Inputs and outputs are files in memory, so that nothing has to be read while the program runs and nothing
waits for a pipe that a child holds open. The wait is for the process's descriptor (woken by the kernel).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.aio.tasks import finish
from forebay.aio.time_limits import not_counted, timeout
from forebay.config import parse_config
from forebay.sandbox import isolation as isolations
from forebay.sandbox.control_group import ControlGroups, find_control_groups

logger = logging.getLogger(__name__)

Text = str | bytes


class Sandbox:
    """Runs programs that no person has read.

    Invariants: a program starts in an empty folder of its own, without the caller's environment; at most
    `max_concurrent` run at once; when `run` returns or is cancelled, the program and all that it started
    have been killed (under ``LIMITS``, all that did not leave its process group). The clock starts when a
    program gets its slot; so does that of a `forebay.aio.time_limits.time_limit` around it.

    >>> sandbox = Sandbox({"wall_s": 2.0})
    >>> program = "print(sum(map(int, input().split())))"
    >>> result = asyncio.run(sandbox.run_python(program, stdin="1 2"))
    >>> result.stdout, result.ok
    ('3\\n', True)

    Args:
        limits: for each program; a mapping of its fields is taken too.
        levels: what may be used, in this order of preference. ``limits`` among them lets programs use the
            network, and read and change whatever this process may: only for programs that you trust.
        python: the interpreter of `run_python`; the installed packages of the running one by default.
        readable: further files and folders that programs may read.
        max_concurrent: None: one for each CPU.

    Raises:
        ValueError: a limit or level that does not exist, or a limit that is not positive.
    """

    def __init__(
        self,
        limits: isolations.Limits | Mapping[str, float] | None = None,
        *,
        levels: Sequence[isolations.Isolation | str] = isolations.CONFINED,
        python: str = sys.executable,
        readable: Iterable[str | Path] = (),
        max_concurrent: int | None = None,
    ) -> None:
        self.limits = parse_config(isolations.Limits, dict(limits or {}), source="limits")
        try:
            self.levels = () if isinstance(levels, str) else tuple(map(isolations.Isolation, levels))
        except ValueError:
            self.levels = ()
        if not self.levels:
            known = ", ".join(level.value for level in isolations.Isolation)
            raise ValueError(f"levels must be a list of some of {known}; got {levels!r}")
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        self.python = python
        self._readable = isolations.readable_paths(python, readable)
        self._slots = asyncio.Semaphore(max_concurrent or os.cpu_count() or 1)
        self._choosing = asyncio.Lock()
        self._level: isolations.Isolation | None = None
        self._groups: ControlGroups | None = None

    async def run_python(
        self, source: str, *, stdin: Text = "", files: Mapping[str, Text] | None = None
    ) -> "SandboxResult":
        """Run the Python program `source`; see `run`."""
        # No user packages, no PYTHON* variables, no bytecode; modules among `files` can be imported.
        command = [self.python, "-s", "-E", "-B", "program.py"]
        return await self.run(command, stdin=stdin, files={**(files or {}), "program.py": source})

    async def run(
        self, command: Sequence[str], *, stdin: Text = "", files: Mapping[str, Text] | None = None
    ) -> "SandboxResult":
        """Run `command` with `files` (by plain name) in its folder, to its end.

        Raises:
            SandboxUnavailableError: no allowed level works here; the message says why for each.
            SandboxError: the program could not be started.
            ValueError: the name of a file is not plain.
        """
        for name in files or {}:
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise ValueError(f"files go by plain names, without folders; got {name!r}")
        with not_counted():
            # The first call tries out the levels, which takes nothing from its program's time.
            level = await self.isolation()
        return await self._run_in(level, command, stdin, files or {})

    async def isolation(self) -> isolations.Isolation:
        """The level that programs run in, found by trying at the first call.

        Raises:
            SandboxUnavailableError: none that is allowed works here.
        """
        # Programs that come meanwhile wait for the choice, instead of trying everything again.
        async with self._choosing:
            if self._level is not None:
                return self._level
            self._groups = find_control_groups(memory_bytes=self.limits.tree_bytes)
            problems: list[str] = []
            for level in self.levels:
                problem = await self._problem_of(level)
                if problem is not None and level is isolations.Isolation.BUBBLEWRAP and self._groups is not None:
                    # Groups can be made here, but not joined: once more without.
                    self._groups = None
                    problem = await self._problem_of(level)
                if problem is None:
                    logger.info("sandbox: %s%s", level.value, "".join(f"; no {text}" for text in problems))
                    self._level = level
                    return level
                problems.append(f"{level.value} ({problem})")
        raise SandboxUnavailableError(
            f"no sandbox works here: {'; '.join(problems)}. Install bubblewrap (bwrap) and allow user "
            f"namespaces, or use Linux 5.13 or newer with Landlock and libseccomp. For programs that you "
            f"trust, 'limits' among the levels runs them with the network open and all files in reach"
        )

    async def _problem_of(self, level: isolations.Isolation) -> str | None:
        if sys.platform != "linux":
            return "only on Linux"
        if level is isolations.Isolation.BUBBLEWRAP and (missing := isolations.missing_programs()):
            return f"not installed: {', '.join(missing)}"
        try:
            result = await self._run_in(level, [self.python, "-S", "-c", ""], "", {})
        except SandboxError as error:
            return str(error)
        return None if result.ok else f"{self.python} ended with {result.returncode}: {result.stderr.strip()}"

    async def _run_in(
        self, level: isolations.Isolation, command: Sequence[str], stdin: Text, files: Mapping[str, Text]
    ) -> "SandboxResult":
        with not_counted():
            await self._slots.acquire()
        try:
            with contextlib.ExitStack() as stack:
                # Standard input, standard output, the chain's standard error, and the program's own.
                streams = [stack.enter_context(in_memory(text)) for text in (stdin, "", "", "")]
                passed, group = streams[3:], None
                if level is isolations.Isolation.BUBBLEWRAP:
                    folder = isolations.BOX
                    opened = {name: stack.enter_context(in_memory(text)) for name, text in files.items()}
                    system_calls = stack.enter_context(in_memory(isolations.system_call_filter()))
                    passed += [*opened.values(), system_calls]
                    argv = isolations.bubblewrap_command(
                        command, self.limits, self._readable, opened, stderr=streams[3], system_calls=system_calls
                    )
                    if self._groups is not None:
                        group = stack.enter_context(self._groups.lend())
                        argv = group.joining(argv)
                else:
                    folder = stack.enter_context(temporary_folder(files))
                    readable = self._readable if level is isolations.Isolation.LANDLOCK else None
                    argv = isolations.launcher_command(command, self.limits, readable, folder, streams[3])
                process = self._start(argv, folder, streams, passed)
                clock = asyncio.get_running_loop().time
                start_s = clock()
                overran = await until_end(process, self.limits.wall_s, tree=level is isolations.Isolation.BUBBLEWRAP)
                # Asked after every program: the next one in the group would be blamed for this one's.
                is_full = group is not None and group.ran_out_of_memory()
                result = self._result(level, process.returncode, overran, clock() - start_s, *streams[1:])
                return replace(result, reason="memory") if is_full and not result.ok else result
        finally:
            self._slots.release()

    def _start(
        self, argv: Sequence[str], folder: str, streams: Sequence[int], passed: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=passed,
            # A group of its own, to be killed as one; and no terminal.
            start_new_session=True,
            cwd="/",
            env={
                "PATH": f"{os.path.dirname(self.python)}:/usr/bin:/bin",
                "HOME": folder,
                "TMPDIR": folder,
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                # Numeric libraries start a thread, and reserve memory, for each CPU.
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def _result(
        self, level: isolations.Isolation, code: int, overran: bool, wall_s: float, out: int, control: int, err: int
    ) -> "SandboxResult":
        problem, started, _ = os.pread(control, 64 << 10, 0).decode(errors="replace").partition(isolations.STARTED)
        if not started:
            cause = f"not started within {wall_s:.1f} s" if overran else f"could not start (code {code})"
            raise SandboxError(f"{level.value}: {cause}: {problem.strip()[-2000:]}")
        code = 128 - code if code < 0 else code
        limit = self.limits.output_bytes
        out_bytes, err_bytes = os.fstat(out).st_size, os.fstat(err).st_size
        return SandboxResult(
            stdout=os.pread(out, limit, 0).decode(errors="replace"),
            stderr=os.pread(err, limit, max(err_bytes - limit, 0)).decode(errors="replace"),
            returncode=code,
            reason="time" if overran else _REASONS.get(code, "signal" if code > 128 else "exit"),
            truncated=max(out_bytes, err_bytes) > limit,
            wall_s=wall_s,
            isolation=level,
        )


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


class SandboxUnavailableError(SandboxError):
    """This machine offers no level of isolation that is allowed."""


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """How a program ended and what it wrote."""

    stdout: str
    """Its first ``output_bytes``, as UTF-8, what is not UTF-8 replaced."""
    stderr: str
    """Its last ``output_bytes``: what went wrong is said at the end."""
    returncode: int
    """128 + n for a program that signal n ended."""
    reason: str
    """``exit``, ``time`` (wall_s), ``cpu``, ``memory`` (of all together), ``file_size`` or ``signal``."""
    truncated: bool
    """Whether it wrote more than is kept."""
    wall_s: float
    isolation: isolations.Isolation

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with code 0."""
        return self.reason == "exit" and self.returncode == 0


_REASONS = {128 + signal.SIGXCPU: "cpu", 128 + signal.SIGXFSZ: "file_size"}


@contextlib.contextmanager
def in_memory(content: Text) -> Iterator[int]:
    """A descriptor of a file in memory that holds `content`, at its beginning."""
    descriptor = os.memfd_create("sandbox")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(_as_bytes(content))
        os.lseek(descriptor, 0, os.SEEK_SET)
        # Two processes that write must not overwrite each other.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(files: Mapping[str, Text]) -> Iterator[str]:
    """A temporary folder with `files`."""
    folder = tempfile.mkdtemp(prefix="forebay_sandbox_")
    try:
        for name, content in files.items():
            Path(folder, name).write_bytes(_as_bytes(content))
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError) as error:
            logger.warning("a program's folder could not be removed: %s (%s)", folder, error)


def _as_bytes(content: Text) -> bytes:
    # JSON can hold halves of surrogate pairs, and models write JSON: the program gets what is no UTF-8 then.
    return content.encode(errors="surrogatepass") if isinstance(content, str) else content


async def until_end(process: subprocess.Popen[bytes], wall_s: float, *, tree: bool) -> bool:
    """Wait for the end of `process` and of all that it started; True if `wall_s` ran out."""
    overran = False
    try:
        async with timeout(wall_s):
            await until_exit(process.pid)
    except TimeoutError:
        overran = True
    finally:
        await finish(_end(process, tree))
    return overran


async def _end(process: subprocess.Popen[bytes], tree: bool) -> None:
    # Not reaped yet, so the number cannot be another process's.
    _kill(process.pid, tree=tree)
    await until_exit(process.pid)
    process.wait()


async def until_exit(pid: int) -> None:
    """Wait for the end of a child that is not reaped before; woken by the kernel."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    descriptor = os.pidfd_open(pid)
    # May be called again before it is removed.
    loop.add_reader(descriptor, lambda: None if ended.done() else ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill(pid: int, *, tree: bool) -> None:
    """Kill the process group of `pid`; for a `tree` in a namespace, its first process, and so all of them.

    bwrap itself then ends when the kernel has ended the namespace: afterwards nothing is left.
    """
    children: list[int] = []
    if tree:
        # Gone if it ended just now.
        with contextlib.suppress(OSError):
            children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    if not children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
