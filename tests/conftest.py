"""Shared by all tests."""

import os

from hypothesis import settings

# Before anything imports torch: with several threads, tiny tensors wait for threads that a busy machine does not run.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples each time: a suite that fails only now and then is broken.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
