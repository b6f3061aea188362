"""The interface of link backends, their registry, and the transfer of installed packages' backends into the shaper.

A link backend emulates the delays and losses of links. It runs in the shaper's container, whose image has the testbed's
own backends only, so an environment variable carries the source text of all others.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from testbed.common.errors import HostError, InputError
from testbed.common.plugins import Registry, subclass_of
from testbed.network.link import Link

if TYPE_CHECKING:
    from testbed_controller.shaping.plan import Access, InterfacePlan
    from testbed_controller.shaping.tc import KernelState

AUTO = "auto"
"""Selects the first backend with `Backend.automatic` and kernel support."""
_VARIABLE = "TESTBED_LINK_BACKENDS"
"""Environment variable with the backends of packages."""
_MOST_BYTES = 120_000
"""Maximum size of the variable in bytes; the kernel limits it to 128 KiB."""


class Backend:
    """Shaping of a link's receiving side; the methods run in the namespace of the device.

    The sending side, with the rates, is shaped by ``tc`` for every backend. docs/extending.md has a complete example::

        class Delays(Backend):
            name = "delays"

            def lines(self, old, new):
                return [f"qdisc replace dev {new.interface} ..."]
    """

    name: ClassVar[str]
    """Name for ``--links``."""
    automatic: ClassVar[bool] = False
    """Whether ``--links auto`` may select the backend; the first such backend with kernel support is selected."""
    requirements: ClassVar[Mapping[str, Callable[[], object]]] = {}
    """Tests by the name of a kernel module, for messages about missing modules.

    A test runs in an empty network namespace and raises `HostError` without the module."""
    uses_queues: ClassVar[bool] = False
    """Whether packets pass netfilter queues, so that their drops are counted."""
    priority: str = "kernel"
    """Scheduling priority of the part that delays packets."""
    tables: str | None = None
    """Folder of delay distribution tables for ``tc``."""

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> Any:
        """Apply a small plan, ``trial``, in a namespace for tests; raises `HostError` if the kernel refuses.

        The result, such as the name of a suitable program, is passed to `open`.
        """

    @classmethod
    def open(cls, kernel: Any, seed: Callable[[], int]) -> Self:
        """Return the backend of a run; ``seed`` returns the seed of random losses."""
        return cls()

    @classmethod
    def link_problem(cls, link: Link, downlink: Access | None) -> str | None:
        """Return the unsupported property of a link, with a remedy; None for a supported link.

        ``downlink`` is the limit of the receiving device.
        """

    def problem(self, plan: InterfacePlan) -> str | None:
        """Return the unsupported part of a plan in the device's namespace, with a remedy; None for a supported plan."""
        for line in plan.receivers:
            problem = self.link_problem(line.link, plan.downlink)
            if problem:
                return problem
        return None

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Prepare a device's interface before ``tc`` runs; with an old plan, apply only the differences."""

    def lines(self, old: InterfacePlan | None, new: InterfacePlan) -> list[str]:
        """Return the commands for ``tc -batch`` that change the old plan to the new one; without ``old``, all."""
        return []

    def reads(self, plan: InterfacePlan) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the state to read back: interfaces with classes, and (interface, parent) pairs with filters."""
        return [], []

    def differences(self, plan: InterfacePlan, observed: KernelState) -> list[str]:
        """Return the differences between the plan and the kernel's state, one text for each."""
        return []

    def statistics(self) -> dict[str, Any]:
        """Return measurements for the verdict of a run: ``lateness`` in seconds, ``processor_seconds``, counters."""
        return {}

    def reset(self) -> None:
        """Reset the measurements."""

    def forget(self, device: str) -> None:
        """Release the resources of an ended device."""

    def close(self) -> None:
        """Release all resources."""


LINK_BACKENDS = Registry(
    "testbed.link_backends",
    {
        "netem": "testbed_controller.shaping.backends:Netem",
        "userspace": "testbed_controller.shaping.backends:Userspace",
    },
    "link backend",
    subclass_of(Backend),
)


def check_name(name: str) -> str:
    """Return a valid backend name or ``auto``; raises `InputError` for an unknown name.

    >>> check_name("netem")
    'netem'
    """
    if name != AUTO and name not in LINK_BACKENDS:
        available = ", ".join((AUTO, *LINK_BACKENDS))
        raise InputError(f"unknown link backend '{name}'; available: {available}")
    return name


def environment_for(names: Iterable[str]) -> dict[str, str]:
    """Return the environment variables of the shaper's container that carry these backends, if packages have them.

    Raises `InputError` for an unusable package.
    """
    # Imported here: this needs pydantic, which the shaper's image lacks.
    from testbed.common.usercode import code_of_package

    objects: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in names:
        if name in (AUTO, *LINK_BACKENDS.own):
            continue
        backend = LINK_BACKENDS.find(name)
        objects[name] = f"{backend.__module__}:{backend.__qualname__}"
        sources |= code_of_package(backend.__qualname__, backend.__module__, ()).sources
    if not objects:
        return {}
    archive = base64.b64encode(_make_archive(sources)).decode()
    packed = json.dumps({"objects": objects, "packages": archive})
    if len(packed) > _MOST_BYTES:
        raise InputError(
            f"the packages of the link backends {', '.join(objects)} are too large for a container's environment "
            f"(more than {_MOST_BYTES:,} bytes compressed): move the backends to a smaller package"
        )
    return {_VARIABLE: packed}


def _make_archive(sources: Mapping[str, str]) -> bytes:
    """Return Python modules as an importable zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for module, text in sources.items():
            path = module.replace(".", "/")
            is_package = any(other.startswith(f"{module}.") for other in sources)
            name = f"{path}/__init__.py" if is_package else f"{path}.py"
            archive.writestr(name, text)
    return file.getvalue()


def adopt_backends(environment: Mapping[str, str]) -> None:
    """Register the backends of an environment from `environment_for`; raises HostError if one cannot be imported."""
    if _VARIABLE not in environment:
        return
    packed = json.loads(environment[_VARIABLE])
    # Python imports from the archive whenever a module is first used, so the file stays until the container ends.
    with tempfile.NamedTemporaryFile(
        prefix="testbed-backends-", suffix=".zip", delete=False
    ) as file:
        file.write(base64.b64decode(packed["packages"]))
    sys.path.append(str(Path(file.name)))
    LINK_BACKENDS.own |= packed["objects"]
    for name in packed["objects"]:
        try:
            LINK_BACKENDS.find(name)
        except Exception as error:
            text = f"the link backend '{name}' cannot be imported in the shaper: {type(error).__name__}: {error}"
            raise HostError(text) from error
