"""Selection of torch's kernels, the functions that compute operations such as a matrix product.

Torch selects kernels by the instruction set of the processor. Kernels differ in the order of sums and in whether they
round between a multiplication and an addition, so results differ in rounding. After a few training steps, losses differ
in nearly all digits. The key `workload.reproducible` selects kernels that every processor has, which are slower.

Part of the selection is made by environment variables, which torch reads when it is imported (`fix`), the rest by
switches of torch (`switch`).
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
"""The key of the scenario that errors name."""


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
    """Set the variables `FIXED`; if torch has read other values, restart the process with the variables."""
    try:
        fix()
    except InputError:
        environment = {**os.environ, **FIXED}
        command = [sys.executable, *sys.orig_argv[1:]]
        # Replaces this process: nothing after this line is executed.
        os.execve(sys.executable, command, environment)


def switch(*, reproducible: bool) -> None:
    """Disable torch's libraries of processor-specific kernels if ``reproducible``, or else enable them."""
    torch.backends.mkldnn.set_flags(not reproducible)  # type: ignore[no-untyped-call]
    torch.backends.nnpack.set_flags(not reproducible)  # type: ignore[no-untyped-call]


@contextmanager
def fixed_kernels(*, reproducible: bool) -> Iterator[None]:
    """Context with fixed kernels if ``reproducible``; `fix` must run before the import of torch."""
    switch(reproducible=reproducible)
    try:
        yield
    finally:
        switch(reproducible=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch uses one thread: several threads divide a sum, which changes the rounding."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def computing() -> dict[str, Any] | None:
    """Return processor, instruction set and torch's version, which decide the rounding of results; None without torch.

    >>> computing()  # doctest: +SKIP
    {'processor': 'AMD EPYC', 'instruction_set': 'AVX512', 'torch': '2.13.0+cpu'}
    """
    # The import takes seconds, and without torch there are no results to round.
    if "torch" not in sys.modules:
        return None
    return {
        "processor": processor_name(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def named(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Format the processors of a run as text; each of ``kinds`` is a result of `computing`.

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
