"""The child's side of the sandbox where there is no bubblewrap: confines itself, then becomes the program.

::

    launcher.py ORDERS PROGRAM... -> end with the parent -> limits -> drop capabilities -> Landlock (files)
                                  -> seccomp (system calls) -> STARTED on standard error -> exec PROGRAM,
                                  whose standard error is another one

Run as a script by an interpreter without packages, so it imports the standard library only. It holds that:

* Files: the `readable` ones can be read, those in `folder` changed, nothing else opened (Landlock). Owners,
  modes, times and attributes cannot be changed (seccomp; Landlock does not cover them).
* Network: no socket can be made but a pair within the process.
* Processes: none can be started (threads can), no signal reaches another process, none can be traced.

It does not bound the folder, which is on a real disk and holds as many files as fit in the time; and the
kernel's attack surface is larger than with namespaces and bubblewrap.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import Any

STARTED = "\x01started\x01"


def main(orders: dict[str, Any], program: Sequence[str]) -> None:
    """Confine this process as `orders` say and become `program`; returns only by an exception."""
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(orders["folder"])
    if orders["processes"] is not None:
        tasks = _count_tasks(os.getuid()) + orders["processes"]
        orders["limits"]["NPROC"] = (tasks, tasks)
    rules = None if orders["readable"] is None else _landlock_rules(libc, orders)
    seccomp = None if rules is None else seccomp_library()
    for name, values in orders["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), tuple(values))
    if rules is not None and seccomp is not None:
        _drop_capabilities(libc)
        _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
        _check(libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
        _filter_system_calls(seccomp)
    # This interpreter ignores them, and what is ignored stays so across exec.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.write(2, STARTED.encode())
    os.dup2(orders["stderr"], 2)
    try:
        os.execvp(program[0], list(program))
    except OSError as error:
        # As a shell says and returns it.
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
        os._exit(127)


# include/uapi/linux: prctl.h, landlock.h, sched.h; include/uapi/asm-generic/unistd.h (the same everywhere)
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 1, 24, 28, 38
_SECBIT_NOROOT_AND_LOCKED = 0b11
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_CLONE_THREAD, _CLONE_NEWUSER = 0x10000, 0x10000000
# bits/socket.h: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (what name resolution uses)
_AF_NETLINK = 16
_AF_ALLOWED = (1, 2, 10, _AF_NETLINK)

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# libseccomp's seccomp.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NOT_EQUAL, _EQUAL, _GREATER, _MASKED_EQUAL = 1, 4, 6, 7

_DENIED_TO_ALL = (
    # The kernel does what is queued there behind every filter's back.
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    # Namespaces of one's own: with a user namespace come the rights to mount and to fill memory.
    *("unshare", "setns"),
    # Other processes' memory.
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "personality"),
    # Memory that no limit counts, and what would outlive the process.
    *("memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open"),
    *("add_key", "request_key", "keyctl"),
    # The rest is for administrators, or a large part of the kernel that programs do without.
    *("mount", "umount", "umount2", "mount_setattr", "move_mount", "open_tree", "open_tree_attr", "fsopen"),
    *("fsmount", "fsconfig", "fspick", "chroot", "pivot_root", "quotactl", "quotactl_fd"),
    *("swapon", "swapoff"),
    *("open_by_handle_at", "name_to_handle_at", "fanotify_init", "bpf", "perf_event_open", "userfaultfd"),
    *("acct", "reboot", "syslog", "kexec_load", "kexec_file_load", "sethostname", "setdomainname"),
    *("init_module", "finit_module", "delete_module", "settimeofday", "clock_settime", "adjtimex"),
    *("ioperm", "iopl", "modify_ldt"),
)
"""System calls that fail with EPERM in every sandbox. All others are allowed: namespaces or Landlock, and the
limits, bound what a program may do with them."""

_DENIED_TO_ONE_PROCESS = (
    # Network: there is no namespace that cuts it.
    "socket",
    # Processes, this one's and others'.
    *("fork", "vfork", "tkill", "pidfd_open", "pidfd_send_signal", "pidfd_getfd"),
    *("setpriority", "ioprio_set", "sched_setattr", "sched_setaffinity", "migrate_pages", "move_pages"),
    # Owners, modes, times and attributes of files; cutting one by its name.
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "fchownat", "lchown", "truncate"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr"),
    *("removexattrat", "file_setattr", "utime", "utimes", "futimesat", "utimensat"),
)
"""System calls that also fail with EPERM where the program shares its namespaces with others."""

_REFUSE = _ERRNO | errno.EPERM


class _Comparison(ctypes.Structure):
    """``struct scmp_arg_cmp``."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno() or -result
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    _check(libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def _count_tasks(uid: int) -> int:
    """Processes and threads of `uid`: its limit counts those that run elsewhere too."""
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # ended meanwhile
    return count


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Let the program have no capability, also if root runs it."""
    if os.geteuid() != 0:
        return
    _prctl(libc, _PR_SET_SECUREBITS, _SECBIT_NOROOT_AND_LOCKED)
    for capability in range(64):
        try:
            _prctl(libc, _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return  # behind the last one that this kernel knows
            raise


def _landlock_rules(libc: ctypes.CDLL, orders: dict[str, Any]) -> int:
    """A ruleset that allows to read `readable` and to change what is in `folder`; its descriptor."""
    abi = _check(libc.syscall(_CREATE_RULESET, None, 0, 1), "landlock_create_ruleset")
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    # TCP from the fourth, abstract sockets and signals from the sixth on; seccomp holds them before that.
    network, scoped = (3 if abi >= 4 else 0), (3 if abi >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scoped)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _check(
        libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset"
    )
    _allow(libc, rules, orders["readable"], _EXECUTE | _READ_FILE | _READ_DIR)
    _allow(libc, rules, _DEVICES, _READ_FILE | _WRITE_FILE)
    _allow(libc, rules, [orders["folder"]], handled)
    return rules


def _allow(libc: ctypes.CDLL, rules: int, paths: Iterable[str], access: int) -> None:
    for path in paths:
        # Through the descriptor: of a link, what it points to.
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        own = access if os.path.isdir(path) else access & ~_READ_DIR
        rule = struct.pack("=Qi", own, descriptor)
        _check(libc.syscall(_ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule({path})")
        os.close(descriptor)


class _Filter:
    """A seccomp filter in the making. Calls without a rule are allowed; another architecture's calls kill."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.seccomp_init.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p(library.seccomp_init(_ALLOW))
        for name in _DENIED_TO_ALL:
            self.rule(name)
        # The flags of clone3 are in memory, where no filter looks; the C library falls back to clone.
        self.rule("clone3", _ERRNO | errno.ENOSYS)

    def rule(self, name: str, action: int = _REFUSE, *comparisons: _Comparison) -> None:
        """Apply `action` to the system call `name` where all `comparisons` hold."""
        number = self.library.seccomp_syscall_resolve_name(name.encode())
        if number == -1:
            return  # newer than this libseccomp
        array = (_Comparison * max(len(comparisons), 1))(*comparisons)
        code = self.library.seccomp_rule_add_array(self.context, action, number, len(comparisons), array)
        _check(code, f"seccomp rule {name}")


def seccomp_library() -> ctypes.CDLL:
    """libseccomp; OSError where it is not installed."""
    return ctypes.CDLL("libseccomp.so.2", use_errno=True)


def namespace_filter() -> bytes:
    """The filter for programs in namespaces of their own, as ``bwrap --add-seccomp-fd`` reads it.

    They may start processes and open sockets. They may not make further namespaces, nor sockets of a family
    that a network namespace does not hold: AF_VSOCK reaches a virtual machine's host, AF_ALG the kernel.

    Raises:
        OSError: libseccomp is not installed or refuses a rule.
    """
    rules = _Filter(seccomp_library())
    rules.rule("clone", _REFUSE, _Comparison(0, _MASKED_EQUAL, _CLONE_NEWUSER, _CLONE_NEWUSER))
    for family in set(range(_AF_NETLINK)) - set(_AF_ALLOWED):
        rules.rule("socket", _REFUSE, _Comparison(0, _EQUAL, family, 0))
    rules.rule("socket", _REFUSE, _Comparison(0, _GREATER, _AF_NETLINK, 0))
    with open(os.memfd_create("filter"), "rb") as file:
        _check(rules.library.seccomp_export_bpf(rules.context, file.fileno()), "seccomp_export_bpf")
        rules.library.seccomp_release(rules.context)
        file.seek(0)
        return file.read()


def _filter_system_calls(library: ctypes.CDLL) -> None:
    """Confine this process, which shares its namespaces with others, to what it may do alone."""
    rules = _Filter(library)
    for name in _DENIED_TO_ONE_PROCESS:
        rules.rule(name)
    # Threads, not processes.
    rules.rule("clone", _REFUSE, _Comparison(0, _MASKED_EQUAL, _CLONE_THREAD, 0))
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        rules.rule(name, _REFUSE, _Comparison(0, _NOT_EQUAL, os.getpid(), 0))
    rules.rule("prlimit64", _REFUSE, _Comparison(0, _NOT_EQUAL, 0, 0))
    rules.rule("prctl", _REFUSE, _Comparison(0, _MASKED_EQUAL, 0xFFFFFFFF, _PR_SET_PDEATHSIG))
    _check(library.seccomp_load(rules.context), "seccomp_load")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
