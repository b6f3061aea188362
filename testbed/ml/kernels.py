"""Selection of torch's kernels: torch chooses them by the processor, and their results differ in rounding.

The order of the sums in a matrix product, and whether a multiplication and an addition are fused, depend on the
instruction set of the processor; after a few training steps losses differ in nearly all digits. The key
`workload.reproducible` fixes the kernels to those that every processor has, which are slower.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from testbed.common.errors import InputError
from testbed.ml.lazy import torch

FIXED = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
"""Environment variables selecting kernels available on every processor, for torch and for MKL's matrix products."""
_KEY = ("workload", "reproducible")
"""The scenario's key, for errors."""


def fix() -> None:
    """Set the environment variables `FIXED`; raises `InputError` if torch has read other values already.

    Torch and MKL read the variables once, when they are imported.
    """
    if all(os.environ.get(name) == value for name, value in FIXED.items()):
        return
    if "torch" in sys.modules:
        settings = [f"{name}={value}" for name, value in FIXED.items()]
        variables = " ".join(settings)
        raise InputError(
            f"torch has chosen its kernels already: start this process with {variables}",
            _KEY,
        )
    os.environ.update(FIXED)


def fix_or_restart() -> None:
    """Set the variables `FIXED`; restart this command with them if torch has read other values."""
    try:
        fix()
    except InputError:
        environment = {**os.environ, **FIXED}
        command = [sys.executable, *sys.orig_argv[1:]]
        # Replaces this process: nothing after this line is executed.
        os.execve(sys.executable, command, environment)


def switch(*, reproducible: bool) -> None:
    """Disable or enable the libraries with processor-specific kernels."""
    torch.backends.mkldnn.set_flags(not reproducible)  # type: ignore[no-untyped-call]
    torch.backends.nnpack.set_flags(not reproducible)  # type: ignore[no-untyped-call]


@contextmanager
def fixed_kernels(*, reproducible: bool) -> Iterator[None]:
    """Context with fixed kernels if requested; `fix` must run before the import of torch."""
    switch(reproducible=reproducible)
    try:
        yield
    finally:
        switch(reproducible=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread, since sums are cut differently among several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def computing() -> dict[str, Any] | None:
    """Return the properties of this process that decide the rounding of results; None without torch.

    These are processor, instruction set and torch's version.

    >>> computing()  # doctest: +SKIP
    {'processor': 'AMD EPYC', 'instruction_set': 'AVX512', 'torch': '2.13.0+cpu'}
    """
    # A process that never needed torch need not import it for this.
    if "torch" not in sys.modules:
        return None
    return {
        "processor": processor_name(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def named(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Format the processors of a run, each a result of `computing`, as text.

    >>> named([{"processor": "Cortex-A72", "instruction_set": "DEFAULT", "torch": "2.9.0"}])
    'Cortex-A72 (DEFAULT, torch 2.9.0)'
    """
    texts = []
    for kind in kinds:
        instructions = f"{kind['instruction_set']}, torch {kind['torch']}"
        texts.append(f"{kind['processor']} ({instructions})")
    return " and ".join(texts)


@cache
def processor_name() -> str:
    """Return the processor name known to Linux, or the architecture if Linux names none, as on ARM."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return os.uname().machine
