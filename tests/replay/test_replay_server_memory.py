"""A process that holds groups keeps the memory of those that were taken."""

import platform
import subprocess
import sys

import pytest

from forebay.replay.remote import server

CHILD = """
import resource, sys
from forebay.replay.remote.server import keep_freed_memory

assert sys.argv[1] == "plain" or keep_freed_memory()
faults = []
for _ in range(20):
    held = [b"x" * 98_000 for _ in range(160)]
    del held
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[9])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_used_again_without_new_pages():
    pages = {
        how: int(subprocess.run([sys.executable, "-c", CHILD, how], capture_output=True, check=True).stdout)
        for how in ("plain", "kept")
    }
    assert pages["kept"] < 100 < pages["plain"]


def test_other_c_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr(server.ctypes, "CDLL", lambda name: object())
    assert not server.keep_freed_memory()
