"""Memory that is freed is used again and not asked of the kernel anew."""

import os
import subprocess
import sys

import pytest

TENSORS = """
import resource, torch
from testbed.common.memory import keep_freed_memory
part = torch.ones(1000, 800)
def layer():
    several = [torch.cat([part, part], dim=1) for _ in range(6)]
def faults():
    for _ in range(5):
        layer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        layer()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults()
keep_freed_memory()
print(first, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_large_tensors_reuse_freed_memory():
    # A fixed threshold, since by default glibc changes it by what was freed before, which differs from run to run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", TENSORS]
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    )
    otherwise, kept = map(int, done.stdout.split())
    assert kept < 1_000  # 60 tensors of 1,563 pages each
    assert otherwise > 10_000
