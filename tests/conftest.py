"""Shared by all tests."""

import os

# Before anything imports torch: with several threads, tiny tensors wait for threads that a busy machine does not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
