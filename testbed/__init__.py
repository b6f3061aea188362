"""The Python interface of the testbed, and the root of the packages that controller and devices share.

    import testbed

    result = testbed.simulate(testbed.load("quickstart", {"workload.epochs": 2}))
    result.metrics["accuracy"], result.frame("steps"), result.plot("Loss")

The functions and classes of `__all__` are the public interface, documented in docs/python.md. They are defined in the
package ``testbed_controller``, which is imported at the first use of one of these names: ``import testbed`` also works
on a device, where this package is not installed. ``__init__.pyi`` has their types.

The subpackages of ``testbed`` import neither ``testbed_agent`` nor ``testbed_controller``, and do not use Docker.
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


_INTERFACE = "testbed_controller.api"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'testbed' has no attribute '{name}'; available: {', '.join(__all__)}"
        )
    try:
        interface = importlib.import_module(_INTERFACE)
    except ModuleNotFoundError as error:
        # Any other missing module is an error of the installation and remains one.
        if error.name not in ("testbed_controller", _INTERFACE):
            raise
        # Only an AttributeError makes `hasattr` return False.
        raise AttributeError(
            f"testbed.{name} needs the package testbed_controller, which devices do not have"
        ) from error
    return getattr(interface, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
