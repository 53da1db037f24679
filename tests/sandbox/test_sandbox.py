"""Programs that misbehave, at every level of isolation that this machine offers."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from forebay.aio.time_limits import time_limit
from forebay.sandbox import CONFINED, Isolation, Limits, Sandbox, SandboxError, SandboxUnavailableError
from forebay.sandbox.control_group import ControlGroups, find_control_groups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

_WORKS: dict[Isolation, str | None] = {}
LIMITS = Limits(wall_s=20.0, cpu_s=5, memory_bytes=512 << 20, output_bytes=1000, file_bytes=1 << 20, processes=8)


async def sandbox_of(level: Isolation, limits: Limits = LIMITS, **options) -> Sandbox:
    if level not in _WORKS:
        try:
            await Sandbox(levels=[level]).isolation()
            _WORKS[level] = None
        except SandboxUnavailableError as error:
            _WORKS[level] = str(error)
    if (problem := _WORKS[level]) is not None:
        pytest.skip(problem)
    return Sandbox(limits, levels=[level], **options)


each_level = pytest.mark.parametrize("level", list(Isolation))
each_confined_level = pytest.mark.parametrize("level", CONFINED)


# What a well-behaved program sees


@each_level
async def test_a_program_gets_its_input_and_files_and_an_empty_folder(level) -> None:
    sandbox = await sandbox_of(level)
    source = """
import os, sys, module
open("mine", "w").write("x")
print(sorted(os.listdir()), module.value, sys.stdin.read())
print(sorted(set(os.environ) - {"PWD", "LC_CTYPE"}))
print("oops", file=sys.stderr)
sys.exit(3)
"""
    files = {"module.py": "value = 7", "data": b"\x00"}
    os.environ["SECRET"] = "s"
    result = await sandbox.run_python(source, stdin="input \u00e9", files=files)
    first, second = result.stdout.splitlines()
    assert first == "['data', 'mine', 'module.py', 'program.py'] 7 input \u00e9"
    assert "SECRET" not in second
    assert (result.stderr, result.returncode, result.reason) == ("oops\n", 3, "exit")
    assert (result.ok, result.truncated) == (False, False)
    assert result.isolation is level


async def test_what_a_program_waits_for_its_slot_does_not_count() -> None:
    sandbox = await sandbox_of(Isolation.LIMITS, max_concurrent=1)
    limits = []

    async def limited():
        async with time_limit(60.0) as limit:
            limits.append(limit)
            return await sandbox.run_python("print(1)")

    await sandbox._slots.acquire()
    waiting = asyncio.create_task(limited())
    await asyncio.sleep(0)
    assert limits[0].when() is None
    sandbox._slots.release()
    assert (await waiting).stdout == "1\n"
    assert limits[0].when() is not None


@each_level
async def test_text_that_is_no_unicode_is_the_programs_problem(level) -> None:
    sandbox = await sandbox_of(level)
    result = await sandbox.run_python("print('\ud800')", stdin="\ud800")
    assert (result.ok, "SyntaxError" in result.stderr) == (False, True)


@each_level
async def test_runs_do_not_see_each_other(level) -> None:
    sandbox = await sandbox_of(level)
    look = "import os; print(sorted(os.listdir())); open('left', 'w').close()"
    results = [await sandbox.run_python(look) for _ in range(2)]
    assert {result.stdout for result in results} == {"['program.py']\n"}


@each_level
async def test_any_command_runs_and_a_missing_one_is_its_own_error(level) -> None:
    sandbox = await sandbox_of(level)
    result = await sandbox.run(["cat", "-"], stdin=b"to and fro")
    assert (result.stdout, result.ok) == ("to and fro", True)
    missing = await sandbox.run(["no-such-program"])
    assert (missing.returncode, missing.reason) == (127, "exit")


@each_level
async def test_installed_packages_can_be_used(level) -> None:
    sandbox = await sandbox_of(level, Limits(wall_s=60.0))
    result = await sandbox.run_python("import numpy; print(numpy.arange(4).sum())")
    assert result.stdout == "6\n", result.stderr


# Limits


@each_level
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "cpu"),
        ("import time; time.sleep(1000)", "time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal"),
    ],
)
async def test_what_ends_a_program_is_said(level, source, reason) -> None:
    limits = Limits(wall_s=1.0) if reason == "time" else Limits(wall_s=60.0, cpu_s=1)
    sandbox = await sandbox_of(level, limits)
    try:
        result = await sandbox.run_python(source)
    except SandboxError as error:
        # On a machine so busy that a second is not enough to start.
        assert "not started within" in str(error)  # noqa: PT017
    else:
        assert (result.reason, result.ok) == (reason, False)
        assert result.returncode > 128


@each_level
async def test_a_memory_hog_is_refused(level) -> None:
    sandbox = await sandbox_of(level)
    result = await sandbox.run_python("x = bytearray(1 << 30)")
    assert "MemoryError" in result.stderr


@each_level
async def test_infinite_output_ends_the_program_and_its_beginning_is_kept(level) -> None:
    sandbox = await sandbox_of(level)
    for command in ([sys.executable, "-c", "while True: print('ab' * 1000)"], ["yes", "ab" * 500]):
        result = await sandbox.run(command)
        assert result.truncated
        assert not result.ok
        assert result.stdout == ("ab" * 500)[:1000]
    assert result.reason == "file_size"


@each_level
async def test_a_file_cannot_grow_without_bound(level) -> None:
    sandbox = await sandbox_of(level)
    result = await sandbox.run_python("open('big', 'wb').write(bytes(2 << 20))")
    assert "File too large" in result.stderr


async def test_under_bubblewrap_all_files_together_are_bounded() -> None:
    sandbox = await sandbox_of(Isolation.BUBBLEWRAP)
    result = await sandbox.run_python("for i in range(9): open(str(i), 'wb').write(bytes(1 << 20))")
    assert "No space left on device" in result.stderr


@each_confined_level
async def test_a_fork_bomb_stays_small(level) -> None:
    sandbox = await sandbox_of(level)
    source = """
import os
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            import time; time.sleep(1000)
        count += 1
except OSError as error:
    print(count, type(error).__name__)
"""
    result = await sandbox.run_python(source)
    if level is Isolation.LANDLOCK:
        assert result.stdout == "0 PermissionError\n"
    else:
        count, error = result.stdout.split()
        assert 1 <= int(count) <= LIMITS.processes
        assert error == "BlockingIOError"


@each_confined_level
async def test_threads_are_bounded_too(level) -> None:
    source = """
import threading
stop = threading.Event()
try:
    for count in range(10_000):
        threading.Thread(target=stop.wait, daemon=True).start()
except (RuntimeError, MemoryError):
    import os
    os.write(1, b"refused")
    os._exit(0)
"""
    sandbox = await sandbox_of(level)
    assert (await sandbox.run_python(source)).stdout == "refused"


# What must not be reached


@each_confined_level
@pytest.mark.parametrize(
    "source",
    [
        "import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('1.1.1.1', 53))",
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect({unix!r})",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=5)",
    ],
)
async def test_the_network_is_cut(level, source, tmp_path) -> None:
    sandbox = await sandbox_of(level)
    met = []
    unix = str(tmp_path / "s")

    async def meet(reader, writer) -> None:
        met.append(1)
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    local = await asyncio.start_unix_server(meet, unix)
    async with server, local:
        port = server.sockets[0].getsockname()[1]
        result = await sandbox.run_python(source.format(port=port, unix=unix))
    assert "Error" in result.stderr
    assert not result.ok
    assert not met


@each_confined_level
async def test_files_of_others_are_out_of_reach(level, tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    sandbox = await sandbox_of(level)
    for attempt in (
        "print(open({path!r}).read())",
        "open({path!r}, 'w').write('x')",
        "import os; os.truncate({path!r}, 0)",
        "import os; os.remove({path!r})",
        "import os; os.chmod({path!r}, 0o600)",
        "import os; os.utime({path!r}, (0, 0))",
        "import os; os.rename({path!r}, 'mine')",
        "import os; os.link({path!r}, 'mine'); print(open('mine').read())",
        "import os; os.symlink({path!r}, 'mine'); print(open('mine').read())",
        "import os; print(os.listdir(os.path.dirname({path!r})))",
        "print(open('/etc/passwd').read())",
        "print(open(f'/proc/{os_pid}/environ').read())",
        "open('/dev/shm/x', 'w')",
        "open('/tmp/forebay_escape', 'w')",
        "import os; os.mkdir('/forebay_escape')",
    ):
        source = attempt.replace("{path!r}", repr(str(secret))).replace("{os_pid}", str(os.getpid()))
        before = secret.stat()
        result = await sandbox.run_python(source)
        assert not result.ok, attempt
        assert "s3cret" not in result.stdout
        after = secret.stat()
        assert (after.st_mtime, after.st_mode, after.st_size) == (before.st_mtime, before.st_mode, 6)


@each_confined_level
async def test_what_is_made_readable_can_be_read_and_not_written(level, tmp_path) -> None:
    data = tmp_path / "data.txt"
    data.write_text("shared")
    data.chmod(0o666)
    sandbox = await sandbox_of(level, readable=[data])
    result = await sandbox.run_python(f"print(open({str(data)!r}).read()); open({str(data)!r}, 'w')")
    assert result.stdout == "shared\n"
    assert not result.ok
    assert data.read_text() == "shared"


@each_confined_level
async def test_no_signal_and_no_tracing_reaches_another_process(level) -> None:
    sandbox = await sandbox_of(level)
    source = f"""
import ctypes, os, signal
for pid in ({os.getpid()}, os.getppid(), 1):
    try:
        os.kill(pid, signal.SIGCONT)
        if pid == {os.getpid()}:
            print("reached")
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, {os.getpid()}, 0, 0) == 0:
    print("traced")
print("done")
"""
    assert (await sandbox.run_python(source)).stdout == "done\n"


@each_confined_level
async def test_privileges_are_gone(level) -> None:
    sandbox = await sandbox_of(level)
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.setuid(0) == 0 and os.getuid() == 0 and libc.chroot(b".") == 0,
       libc.mount(b"none", b".", b"tmpfs", 0, None) == 0,
       libc.unshare(0x10000000 | 0x20000) == 0])
"""
    assert (await sandbox.run_python(source)).stdout.startswith("[False, False, ")


# The end of the tree

TREE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[2]).read()
        time.sleep(1000)
    time.sleep(1000)
time.sleep(1000)
"""
ALONE = "import sys, time; open(sys.argv[2]).read(); time.sleep(1000)"


def processes_with(marker: str) -> list[int]:
    """Running processes that have `marker` among their arguments, the sandbox's own included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def all_end(pids: list[int]) -> bool:
    """Whether all of `pids` end, in time; woken by each end."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], 20)[0]:
                return False
        finally:
            os.close(descriptor)
    return True


def gate(tmp_path: Path) -> Path:
    """A named pipe: who opens it to write waits until the program opens it to read."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    path.chmod(0o666)
    return path


def tree_of(level: Isolation) -> str:
    return ALONE if level is Isolation.LANDLOCK else TREE


@each_confined_level
async def test_cancelling_kills_the_whole_tree(level, tmp_path) -> None:
    path, marker = gate(tmp_path), uuid.uuid4().hex
    sandbox = await sandbox_of(level, Limits(wall_s=60.0), readable=[path], max_concurrent=1)
    run = asyncio.create_task(sandbox.run([sys.executable, "-c", tree_of(level), marker, str(path)]))
    await asyncio.to_thread(path.write_text, "go")
    assert processes_with(marker)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not processes_with(marker)
    # The slot is free again.
    assert (await sandbox.run(["true"])).ok


@each_confined_level
async def test_what_a_program_leaves_behind_ends_with_it(level, tmp_path) -> None:
    marker = uuid.uuid4().hex
    sandbox = await sandbox_of(level, Limits(wall_s=60.0))
    source = TREE.replace("open(sys.argv[2]).read()", "pass")
    source = source.rpartition("time.sleep(1000)")[0]
    result = await sandbox.run([sys.executable, "-c", source, marker])
    assert result.ok == (level is not Isolation.LANDLOCK)
    assert all_end(processes_with(marker))


OWNER = """
import asyncio, sys
from forebay.sandbox import Limits, Sandbox
level, source, marker, gate = sys.argv[1:]
sandbox = Sandbox(Limits(wall_s=60.0), levels=[level], readable=[gate])
asyncio.run(sandbox.run([sys.executable, "-c", source, marker, gate]))
"""


@each_confined_level
async def test_programs_end_when_their_owner_is_killed(level, tmp_path) -> None:
    path, marker = gate(tmp_path), uuid.uuid4().hex
    await sandbox_of(level)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, level.value, tree_of(level), marker, str(path)],
        # Killed, it leaves its folder behind.
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    await asyncio.to_thread(path.write_text, "go")
    running = processes_with(marker)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert len(running) > 1
    assert await asyncio.to_thread(all_end, running)


# The sandbox itself


@each_confined_level
async def test_runs_are_bounded_and_wait_without_using_up_their_time(level) -> None:
    sandbox = await sandbox_of(level, Limits(wall_s=20.0), max_concurrent=2)
    results = await asyncio.gather(*(sandbox.run_python("print(1)") for _ in range(5)))
    assert [result.stdout for result in results] == ["1\n"] * 5


async def test_without_a_level_that_works_nothing_runs(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox = Sandbox(levels=["bubblewrap"])
    with pytest.raises(SandboxUnavailableError, match=r"bubblewrap \(not installed: bwrap"):
        await sandbox.run_python("print(1)")


async def test_an_interpreter_that_does_not_run_is_the_sandboxs_failure() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"landlock \(/no/python ended with 127"):
        await Sandbox(levels=["landlock"], python="/no/python").isolation()


async def test_what_the_caller_got_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="'wall_s' = 0: Input should be greater than 0"):
        Sandbox({"wall_s": 0})
    with pytest.raises(ValueError, match="unknown key 'wall'; did you mean 'wall_s'"):
        Sandbox({"wall": 1})
    with pytest.raises(ValueError, match="some of bubblewrap, landlock, limits; got 'limits'"):
        Sandbox(levels="limits")
    with pytest.raises(ValueError, match="max_concurrent must be at least 1"):
        Sandbox(max_concurrent=0)
    with pytest.raises(ValueError, match=r"plain names, without folders; got '\.\./x'"):
        await Sandbox().run(["true"], files={"../x": ""})


# What a program could use to get round the limits

NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
NEWUSER, NEWNS, SIGCHLD = 0x10000000, 0x20000, 17
print(libc.unshare(NEWUSER), libc.unshare(NEWUSER | NEWNS))
# By the bare system calls, clone and clone3, which libc does not wrap.
print(libc.syscall(56, NEWUSER | SIGCHLD, 0, 0, 0, 0))
arguments = (ctypes.c_uint64 * 8)(NEWUSER, 0, 0, 0, SIGCHLD, 0, 0, 0)
print(libc.syscall(435, arguments, 64))
print(libc.mount(b"none", b".", b"tmpfs", 0, None))
"""


@each_confined_level
async def test_no_namespace_can_be_made_and_nothing_mounted(level) -> None:
    sandbox = await sandbox_of(level)
    assert (await sandbox.run_python(NAMESPACES)).stdout == "-1 -1\n-1\n-1\n-1\n"


@each_confined_level
@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        ("io_uring", "libc.syscall(425, 4, (ctypes.c_char * 120)())"),
        ("memory files", "libc.memfd_create(b'x', 0)"),
        ("shared memory segments", "libc.shmget(0, 1 << 20, 0o1600)"),
        ("keys", "libc.syscall(248, b'user', b'x', b'y', 1, -3)"),
        ("the virtual machine's host", "libc.socket(40, 1, 0)"),
        ("the kernel's ciphers", "libc.socket(38, 5, 0)"),
        ("raw packets", "libc.socket(17, 3, 0)"),
    ],
)
async def test_memory_and_ways_out_that_no_limit_counts_are_closed(level, name, attempt) -> None:
    sandbox = await sandbox_of(level)
    source = f"import ctypes; libc = ctypes.CDLL(None); print({attempt})"
    assert (await sandbox.run_python(source)).stdout == "-1\n", name


async def test_under_bubblewrap_programs_may_talk_to_themselves_and_start_others() -> None:
    sandbox = await sandbox_of(Isolation.BUBBLEWRAP)
    source = """
import multiprocessing, os, socket, subprocess
server = socket.socket(socket.AF_UNIX)
server.bind("mine")
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=theirs.send, args=(7,))
process.start()
print(ours.recv())
os.chmod("mine", 0o600)
"""
    result = await sandbox.run_python(source)
    assert (result.stdout, result.ok) == ("child\n7\n", True), result.stderr


HOGS = """
import os
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        memory = bytearray({size} << 20)
        os.read(0, 1)
        os._exit(0)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


async def test_control_groups_bound_the_memory_of_all_processes_together() -> None:
    sandbox = await sandbox_of(Isolation.BUBBLEWRAP)
    await sandbox.isolation()
    if sandbox._groups is None:
        pytest.skip("this process may make no control groups")
    for size, reason in ((20, "exit"), (400, "memory"), (20, "exit")):
        result = await sandbox.run_python(HOGS.format(size=size) + f"raise SystemExit({int(size == 400)})")
        assert result.reason == reason, result


async def test_control_groups_of_a_killed_process_are_removed(tmp_path) -> None:
    orphan = tmp_path / "forebay-program-999999999-3"
    orphan.mkdir()
    ControlGroups(tmp_path, memory_bytes=1)
    assert not orphan.exists()


@pytest.mark.parametrize(("own", "delegated", "found"), [("a/b", "a/b", "a/b"), ("a/b", "a", "a"), ("a/b", ".", None)])
def test_control_groups_of_a_unified_hierarchy_are_made_where_controllers_are_given(
    own, delegated, found, tmp_path
) -> None:
    mount = tmp_path / "cgroup"
    (mount / own).mkdir(parents=True)
    for folder in (mount, mount / "a", mount / own):
        given = "cpu memory pids" if folder == mount / delegated else "cpu"
        (folder / "cgroup.subtree_control").write_text(given)
    process = tmp_path / "process"
    process.mkdir()
    (process / "mountinfo").write_text(f"35 25 0:30 / {mount} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n")
    (process / "cgroup").write_text(f"0::/{own}\n")
    groups = find_control_groups(memory_bytes=1 << 20, process=process)
    if found is None:
        assert groups is None
    else:
        assert groups is not None
        with groups.lend() as group:
            assert group.folder.parent == mount / found
            assert (group.folder / "memory.max").read_text() == str(1 << 20)
            (group.folder / "memory.events").write_text("oom 1\noom_kill 2\n")
            assert [group.ran_out_of_memory() for _ in range(2)] == [True, False]
