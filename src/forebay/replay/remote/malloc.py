"""The memory of a process that does nothing but hold groups.

::

    groups taken --free--> kept by the process --malloc--> groups that come next
                   '-- more than `KEPT_BYTES` of it: back to the system

By default the C library gives freed memory back at once, and each group that comes next has the system find
and clear its pages anew: a fifth of the time of a put. It concerns the whole process, so it is for those that
were started for a buffer, not for a program that serves one beside other work.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 256 << 20
"""Free memory at most that is not given back: some thousand groups of 1,000 tokens each."""

APART_BYTES = 32 << 20
"""What is larger gets pages of its own, which go back at once; the C library allows no more."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Have the C library do so from now on; False if it is not one that can."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_M_TRIM_THRESHOLD, KEPT_BYTES) and set_option(_M_MMAP_THRESHOLD, APART_BYTES))
