from testbed_controller.api import (
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
__version__: str
