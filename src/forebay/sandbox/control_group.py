"""A control group for each program: the kernel counts the memory of its whole tree.

``ulimit`` holds for each process alone: 32 processes may take 32 times the memory. A control group holds
them together, where this process may make one: as root with the hierarchy mounted writable, or in a part of
it that systemd has delegated. Elsewhere `find_control_groups` gives None, and the limits of a process stand
alone. (The number of processes needs no group: the kernel counts them for the user that the program runs as.)

::

    find_control_groups -> ControlGroups.lend() -> a free group, or a new one with its limit --+
                               ^                                                               |
                               +-- free again, for the next program <-- all ended <-- joined --+

Groups are kept for the next program, because the kernel may refuse to remove one for some time after its
last process has ended. They go with the `ControlGroups`; those of a killed process go when another process
looks for its own.
"""

import contextlib
import itertools
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "forebay-program-"
_NUMBERS = itertools.count()
_REFUSED: set[Path] = set()
# The shell writes itself into the group ("0" means the writer) and becomes the program.
_JOIN = 'echo 0 >"$0" && exec "$@"'


class ControlGroups:
    """Lends groups that hold `memory_bytes` each, swap included, made in the folder `parent`."""

    def __init__(self, parent: Path, *, memory_bytes: int) -> None:
        self.parent = parent
        self.memory_bytes = memory_bytes
        self._free: list[ControlGroup] = []
        self._made: list[Path] = []
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).split("-")[0]
            if not os.path.exists(f"/proc/{owner}"):
                _remove([folder], os.getpid())  # its owner was killed before it could
        weakref.finalize(self, _remove, self._made, os.getpid())

    @contextlib.contextmanager
    def lend(self) -> "Iterator[ControlGroup]":
        """A group whose processes end before the block does.

        Raises:
            OSError: a new group cannot be made.
        """
        group = self._free.pop() if self._free else self._make()
        try:
            yield group
        finally:
            self._free.append(group)

    def _make(self) -> "ControlGroup":
        folder = self.parent / f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        folder.mkdir()
        self._made.append(folder)
        if (folder / "memory.limit_in_bytes").exists():  # the first version of control groups
            # The second counts swap as well, and may not be set below the first.
            limit, others = "memory.limit_in_bytes", {"memory.memsw.limit_in_bytes": self.memory_bytes}
        else:
            limit, others = "memory.max", {"memory.swap.max": 0, "memory.oom.group": 1}
        (folder / limit).write_text(str(self.memory_bytes))
        for name, value in others.items():
            if (folder / name).exists():  # not every kernel counts swap
                (folder / name).write_text(str(value))
        return ControlGroup(folder)


@dataclass
class ControlGroup:
    """The group of one program at a time."""

    folder: Path
    num_killed: int = 0
    """Processes of earlier programs that the kernel killed for want of memory."""

    def joining(self, command: list[str]) -> list[str]:
        """The command that joins the group and then becomes `command`."""
        return ["sh", "-c", _JOIN, str(self.folder / "cgroup.procs"), *command]

    def ran_out_of_memory(self) -> bool:
        """Whether, since the last call, the kernel has killed a process because the group was full."""
        before = self.num_killed
        # The file's name in the unified hierarchy, and in the first version of control groups.
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                counts = dict(line.split() for line in (self.folder / name).read_text().splitlines())
                self.num_killed = int(counts.get("oom_kill", 0))
        return self.num_killed > before


def _remove(folders: Iterable[Path], owner: int) -> None:
    """Remove the groups that process `owner` made, and those whose removal the kernel refused before."""
    if os.getpid() != owner:
        return  # a fork has inherited the finalizer, not the groups
    _REFUSED.update(folders)
    for folder in list(_REFUSED):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass  # another process has removed this orphan
        except OSError:
            continue  # its last process has just ended
        _REFUSED.discard(folder)


def find_control_groups(*, memory_bytes: int, process: Path = Path("/proc/self")) -> ControlGroups | None:
    """Groups of this size where this process may make some, found by making one; None: nowhere.

    `process` is the folder in which ``cgroup`` and ``mountinfo`` tell of the process (cgroups(7), proc(5)).
    """
    try:
        parents = list(_parents(process))
    except OSError:
        return None
    for parent in parents:
        try:
            groups = ControlGroups(parent, memory_bytes=memory_bytes)
            with groups.lend():
                return groups
        except OSError as error:
            logger.debug("no control group can be made in %s: %s", parent, error)
    return None


def _parents(process: Path) -> Iterator[Path]:
    """Folders in which groups with a memory controller may be made."""
    own = _own_folders(process)
    if "memory" in own:
        yield own["memory"]
    if "" in own:
        # A group that has processes cannot give controllers to groups in it: the one above is tried too.
        for folder in (own[""], own[""].parent):
            with contextlib.suppress(OSError):
                if "memory" in (folder / "cgroup.subtree_control").read_text().split():
                    yield folder


def _own_folders(process: Path) -> dict[str, Path]:
    """The folder of this process's group by controller; "" is the unified hierarchy's."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in (process / "mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, _, root, point, *_ = fields.split()
        kind, _, options = rest.split(maxsplit=2)
        for controller in [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []:
            mounts[controller] = (root, point)
    folders: dict[str, Path] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            # Paths count from the hierarchy's root; a container's mount may begin further down.
            if controller in mounts and path.startswith(root := mounts[controller][0].rstrip("/")):
                folders[controller] = Path(mounts[controller][1] + path[len(root) :])
    return folders
