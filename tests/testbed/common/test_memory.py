"""Reuse of freed memory by the allocator."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from testbed.common.memory import keep_freed_memory
part = torch.ones(1000, 800)
def allocate_tensors():
    tensors = [torch.cat([part, part], dim=1) for _ in range(6)]
def count_page_faults():
    for _ in range(5):
        allocate_tensors()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        allocate_tensors()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = count_page_faults()
keep_freed_memory()
print(first, count_page_faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="is about glibc")
def test_large_tensors_reuse_freed_memory():
    # By default, glibc adapts this threshold to the sizes of freed blocks, which differ from run to run.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    )
    faults_by_default, faults_with_reuse = map(int, process.stdout.split())
    # 60 tensors of 1,563 pages each would cause 93,780 faults.
    assert faults_by_default > 10_000
    assert faults_with_reuse < 1_000
