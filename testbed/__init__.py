"""The testbed from Python, and the packages that all of its sides share.

    import testbed

    run = testbed.simulate(testbed.load("quickstart", {"workload.epochs": 2}))
    run.figures["accuracy"], run.frame("steps"), run.plot("Loss")

The functions and classes of `__all__` are the public interface, documented in docs/python.md. They are imported with
their first use, since they belong to ``controller``, which a device does not have. The packages below ``testbed``
import neither ``agent`` nor ``controller`` and touch no Docker and no sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from controller.api import (
        Callback,
        InputError,
        Live,
        Result,
        Results,
        TestbedError,
        build,
        emulate,
        live,
        load,
        open_results,
        run,
        simulate,
        sweep,
    )

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
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'testbed' has no attribute '{name}'; available: {', '.join(__all__)}")
    from controller import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
