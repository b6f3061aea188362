"""Puts into the wheel what lies beside the packages in a checkout: the shipped scenarios, and what makes the images.

With TESTBED_COMPILE set, the modules of the simulator that run for each message are compiled by mypyc, which comes with
mypy and needs a C compiler. Beside the compiled ones lie the same modules as Python has them.
"""

import os

from setuptools import Extension, find_packages, setup

BESIDE = {"testbed.scenario.shipped": "scenarios", "controller.lab.recipes": "images"}
COMPILED = [
    "calendar",
    "channel",
    "crossing",
    "device",
    "host",
    "medium",
    "recorder",
    "reno",
    "shared_channel",
    "sharing",
]
"""Modules of `testbed.simulation`."""


def extensions() -> list[Extension]:
    """Return what is to be compiled."""
    if not os.environ.get("TESTBED_COMPILE"):
        return []
    from mypyc.build import mypycify

    modules = [f"testbed/simulation/{name}.py" for name in COMPILED]
    options = [
        "--config-file=",
        "--follow-imports=skip",
    ]  # types of torch and numpy are of no use here, and take minutes
    level = os.environ.get("MYPYC_OPT_LEVEL", "3")  # by the name under which mypyc itself reads it
    return mypycify([*options, *modules], group_name="testbed_simulation", opt_level=level, debug_level="0")


setup(
    packages=[*find_packages(include=["testbed*", "agent*", "controller*"]), *BESIDE],
    package_dir=BESIDE,
    ext_modules=extensions(),
)
