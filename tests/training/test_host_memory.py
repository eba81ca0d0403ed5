"""Large blocks that a CPU step frees are used again by the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from olmo_ext.training.host_memory import keep_freed_memory

FAULTS = """
import ctypes, resource, sys
from olmo_ext.training.host_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
def step():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_a_large_block_is_cleared_by_the_kernel_once_and_not_at_every_step() -> None:
    asked_each_time, kept = page_faults("as it is"), page_faults("kept")
    assert kept < asked_each_time / 10


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_an_allocator_that_the_user_has_tuned_is_left_alone(name: str) -> None:
    assert not keep_freed_memory({name: "1"})
