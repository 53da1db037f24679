"""The levels of isolation, strongest first, and the command line that starts a program in each.

::

    BUBBLEWRAP  setpriv -> bwrap: user, process, network, mount ... namespaces -> prlimit -> sh -> program
    LANDLOCK    launcher: limits, no capabilities, Landlock, seccomp                            -> program
    LIMITS      launcher: limits                                                                -> program

Each in a chain becomes the next program (only ``bwrap`` stays, to wait). The one before the last writes
`STARTED` to the chain's standard error, and then gives the program one of its own: the program cannot write
where it is said that the sandbox stood. This module builds command lines, `forebay.sandbox.runner` runs
them.
"""

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path

from pydantic import PositiveFloat, PositiveInt

from forebay.config import StrictModel
from forebay.sandbox import launcher

STARTED = launcher.STARTED
BOX = "/box"
"""The program's folder under `Isolation.BUBBLEWRAP`."""


class Isolation(StrEnum):
    """How a program is held, strongest first. All but LIMITS cut the network.

    ``BUBBLEWRAP``: namespaces of its own; it sees the interpreter, the system's programs and an empty folder
    in memory. ``LANDLOCK``: kernel rules on files and system calls; one process that cannot start others.
    ``LIMITS``: time, memory and file size only; not a sandbox.
    """

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    LIMITS = "limits"


CONFINED = (Isolation.BUBBLEWRAP, Isolation.LANDLOCK)
"""The levels that are sandboxes."""


class Limits(StrictModel):
    """The time, memory and files that one program may use.

    >>> Limits(wall_s=5.0, file_bytes=1 << 20).folder_bytes
    4194304

    Raises:
        ValueError: a limit is not positive.
    """

    wall_s: PositiveFloat = 10.0
    """Seconds on the event loop's clock, from the start of the sandbox on."""
    cpu_s: PositiveInt = 10
    """Seconds of CPU time of each process."""
    memory_bytes: PositiveInt = 1 << 30
    """Address space of each process; where there are control groups, also the memory of all together (beside
    `folder_bytes` and the outputs). numpy alone takes some hundred MiB."""
    output_bytes: PositiveInt = 1 << 20
    """The part of each of the two outputs that is kept."""
    file_bytes: PositiveInt = 16 << 20
    """The largest file, outputs included."""
    processes: PositiveInt = 32
    """Processes and threads at a time; under Landlock a program is one process whatever this says."""

    @property
    def folder_bytes(self) -> int:
        """All that the folder holds under bubblewrap: it is in memory."""
        return 4 * self.file_bytes

    @property
    def tree_bytes(self) -> int:
        """Memory of all of a program's processes together, its folder and two outputs included."""
        return self.memory_bytes + self.folder_bytes + 2 * self.file_bytes + _OVERHEAD_BYTES


# Root's programs run as users that do not exist (systemd's ranges end below): the kernel does not count the
# processes of root, and counts those of any other user together.
_FIRST_FREE_UID, _NUM_FREE_UIDS = 0x70000000, 1 << 24
# `ulimit -n`: besides files it bounds what may be kept in memory files, each of them Limits.file_bytes.
_MAX_OPEN_FILES = 64
# bwrap, which waits outside and inside, and the kernel's own records of the tree.
_OVERHEAD_BYTES = 16 << 20
_SYSTEM_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    # The loader, Debian's alternatives and the clock need these of /etc; the rest of it stays hidden.
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"),
)
# The shell knows descriptors of one digit only; the program's standard error may have a higher one.
_MARK_AND_RUN = 'printf %s "$0" >&2; err=/proc/self/fd/$1; shift; exec "$@" 2>>"$err"'


def readable_paths(python: str, further: Iterable[str | Path]) -> list[str]:
    """The existing files and folders that a program may read: the system's, the interpreter's, `further`."""
    # The interpreter's own installation besides its virtual environment, at the places it looks for them.
    interpreter = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(python)))
    paths = [*_SYSTEM_PATHS, *interpreter, *(str(Path(path).absolute()) for path in further)]
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def missing_programs() -> list[str]:
    """The programs that `Isolation.BUBBLEWRAP` is made of and that are not installed."""
    missing = [name for name in ("bwrap", "setpriv", "prlimit", "sh") if shutil.which(name) is None]
    try:
        launcher.seccomp_library()
    except OSError:
        missing.append("libseccomp")
    return missing


system_call_filter = cache(launcher.namespace_filter)
"""The filter of `bubblewrap_command`, made once."""


def bubblewrap_command(
    program: Sequence[str],
    limits: Limits,
    readable: Sequence[str],
    files: Mapping[str, int],
    *,
    stderr: int,
    system_calls: int,
) -> list[str]:
    """The command that runs `program` under bubblewrap.

    `files` are open descriptors by name in `BOX`; `stderr` is the program's; `system_calls` holds
    `system_call_filter`.
    """
    mounts: list[str] = []
    # The folders that they are in, outer ones first: those that bwrap makes unasked are root's alone.
    folders = {str(parent) for path in readable for parent in Path(path).parents}
    for folder in sorted(folders - {"/"}):
        mounts += ["--perms", "0755", "--dir", folder]
    for path in readable:
        link = ["--symlink", os.readlink(path)] if os.path.islink(path) else ["--ro-bind", path]
        mounts += [*link, path]
    for name, descriptor in files.items():
        mounts += ["--perms", "0644", "--file", str(descriptor), f"{BOX}/{name}"]
    privileges, become = ["--unshare-user", "--disable-userns"], list[str]()
    if os.geteuid() == 0:
        # Root's programs change their user inside, which a user namespace with one user does not allow; here
        # the system call filter alone denies further user namespaces. They change it in the sandbox, and not
        # before it, because the interpreter may be in a folder that only root may enter.
        names = ("SETUID", "SETGID", "SETPCAP")
        privileges = [word for name in names for word in ("--cap-add", f"CAP_{name}")]
        uid = str(_FIRST_FREE_UID + secrets.randbelow(_NUM_FREE_UIDS))
        drop = ["--bounding-set", "-all", "--inh-caps", "-all", "--no-new-privs"]
        become = _found("setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", *drop, "--")
    # Counted in the namespace: bwrap's own process is one of them.
    nproc = (limits.processes + 1, limits.processes + 1)
    resources = {**_resource_limits(limits), "nproc": nproc}
    return [
        # The signal comes when the process that started the sandbox ends, even by SIGKILL.
        *_found("setpriv", "--pdeathsig", "KILL", "--"),
        *_found("bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *("--unshare-cgroup-try", "--die-with-parent", *privileges, "--add-seccomp-fd", str(system_calls)),
        # bwrap's own folders are in memory too, and would be as large as half of it.
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(limits.folder_bytes), "--tmpfs", BOX, *mounts),
        *("--remount-ro", "/", "--chdir", BOX, "--", *become),
        *_found("prlimit", *(f"--{name}={soft}:{hard}" for name, (soft, hard) in resources.items()), "--"),
        *_found("sh", "-c", _MARK_AND_RUN, STARTED, str(stderr)),
        *program,
    ]


def launcher_command(
    program: Sequence[str], limits: Limits, readable: Sequence[str] | None, folder: str, stderr: int
) -> list[str]:
    """The command that runs `program` in `folder` behind the launcher.

    `readable` None: with limits only. `stderr` is the program's, an open descriptor.
    """
    orders = {
        "limits": {name.upper(): value for name, value in _resource_limits(limits).items()},
        "processes": limits.processes if readable is None else None,
        "readable": readable,
        "folder": folder,
        "stderr": stderr,
    }
    return [sys.executable, "-I", "-S", "-B", launcher.__file__, json.dumps(orders), *program]


def _found(name: str, *arguments: str) -> list[str]:
    path = shutil.which(name)
    assert path is not None, name
    return [path, *arguments]


def _resource_limits(limits: Limits) -> dict[str, tuple[int, int]]:
    """Soft and hard limits by the names of `prlimit` and, in capitals, of the kernel."""
    return {
        "as": (limits.memory_bytes, limits.memory_bytes),
        # The soft limit's signal says why the program ended; the hard one cannot be caught.
        "cpu": (limits.cpu_s, limits.cpu_s + 1),
        "fsize": (limits.file_bytes, limits.file_bytes),
        "nofile": (_MAX_OPEN_FILES, _MAX_OPEN_FILES),
        "core": (0, 0),
    }
