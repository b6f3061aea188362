"""Torch's kernels: torch chooses them by the processor's instruction set, and each rounds differently.

`workload.reproducible` fixes them. The order of a matrix product's sums, and whether a product is rounded before it is
added, depend on the instruction set; after some training steps hardly a digit of a loss is equal. The fixed kernels are
those that every processor has, so they are slower.
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
"""Variables by which torch's own kernels, and MKL's matrix products, are those that every processor has."""
_KEY = ("workload", "reproducible")


def fix() -> None:
    """Set the variables of `FIXED`, which torch and MKL read once; raises `InputError` where torch has read others."""
    if all(os.environ.get(name) == value for name, value in FIXED.items()):
        return
    if "torch" in sys.modules:
        variables = " ".join(f"{name}={value}" for name, value in FIXED.items())
        raise InputError(f"torch has chosen its kernels already: start this process with {variables}", _KEY)
    os.environ.update(FIXED)


def fix_or_restart() -> None:
    """Set the variables of `FIXED`; where torch has read others, start this command again with them."""
    try:
        fix()
    except InputError:
        environment = {**os.environ, **FIXED}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def switch(reproducible: bool) -> None:
    """Switch off, or on again, the libraries that compile kernels for the processor they run on."""
    torch.backends.mkldnn.set_flags(not reproducible)  # type: ignore[no-untyped-call]
    torch.backends.nnpack.set_flags(not reproducible)  # type: ignore[no-untyped-call]


@contextmanager
def chosen(reproducible: bool) -> Iterator[None]:
    """Compute with fixed kernels inside, if asked for; `fix` comes before torch is imported."""
    switch(reproducible)
    try:
        yield
    finally:
        switch(False)


def computing() -> dict[str, Any] | None:
    """Return what numerics depend on: processor, instruction set and version of torch; None before torch is imported.

    >>> computing()
    {'processor': 'AMD EPYC', 'instruction_set': 'AVX512', 'torch': '2.13.0+cpu'}
    """
    if "torch" not in sys.modules:
        return None
    return {
        "processor": _processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def named(kinds: Sequence[Mapping[str, Any]]) -> str:
    """Return the processors of a run as text."""
    return " and ".join(f"{each['processor']} ({each['instruction_set']}, torch {each['torch']})" for each in kinds)


@cache
def _processor() -> str:
    """Return the processor's name as Linux has it; the architecture where it names none, as on ARM."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return os.uname().machine
