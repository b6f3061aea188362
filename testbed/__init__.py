"""The Python interface of the testbed, and the root of the packages shared by controller and agents.

    import testbed

    run = testbed.simulate(testbed.load("quickstart", {"workload.epochs": 2}))
    run.metrics["accuracy"], run.frame("steps"), run.plot("Loss")

The functions and classes of `__all__` are the public interface, documented in docs/python.md. They are imported with
their first use, since they belong to ``controller``, which a device does not have; ``__init__.pyi`` has their types.
The packages below ``testbed`` import neither ``agent`` nor ``controller`` and touch no Docker and no sockets.
"""

from __future__ import annotations

import importlib
from typing import Any

from testbed.common.version import VERSION

__all__ = [
    "Callback",
    "InputError",
    "Live",
    "Result",
    "Results",
    "TestbedError",
    "build",
    "emulate",
    "live",
    "load",
    "open_results",
    "run",
    "simulate",
    "sweep",
]
__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'testbed' has no attribute '{name}'; available: {', '.join(__all__)}"
        )
    return getattr(importlib.import_module("testbed_controller.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
