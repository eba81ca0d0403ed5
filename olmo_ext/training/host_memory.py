"""Training on a CPU: the C library keeps large blocks instead of giving them back at every step.

glibc maps every block above 32 MiB afresh and unmaps it when it is freed. The logits of one step are such blocks,
and the kernel clears each of their pages again: half of a small model's step went there.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""Parameters of `mallopt`, from glibc's malloc.h."""

_LARGEST = 2**31 - 1
_USERS_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask glibc to serve large blocks from its heap and to keep that heap at its peak.

    Says whether it was asked: not where the user has tuned the allocator, nor with another C library.
    """
    if not sys.platform.startswith("linux") or any(name.startswith(_USERS_SETTINGS) for name in environment):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _LARGEST, _M_TOP_PAD: 256 * 2**20}
    return all([mallopt(parameter, value) == 1 for parameter, value in settings.items()])
