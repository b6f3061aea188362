"""The contract of link backends, their registry, and how a package's backend reaches the shaper's container."""

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
    from testbed_controller.shaping.tc import Shown

AUTO = "auto"
"""Stands for the first backend with `Backend.automatic` that the kernel supports."""
_ENVIRONMENT = "TESTBED_LINK_BACKENDS"
_MOST_BYTES = 120_000
"""The kernel allows 128 KiB for one variable of an environment."""


class Backend:
    """Shapes the receiver's side of the links of one host; its methods run in the namespace of the device.

    The sender's side, the rates, is shaped by ``tc`` for every backend.
    """

    name: ClassVar[str]
    """The name for ``--links``."""
    automatic: ClassVar[bool] = False
    """Whether ``--links auto`` may choose it, in the order of the registry."""
    requirements: ClassVar[Mapping[str, Callable[[], object]]] = {}
    """Kernel module -> a trial in a scratch namespace that raises `HostError` without it."""
    uses_queues: ClassVar[bool] = False
    """Whether packets pass netfilter queues, whose drops are then counted."""
    priority: str = "kernel"
    """How the kernel schedules the part that delays packets."""
    tables: str | None = None
    """Folder of the distribution tables for ``tc``."""

    @classmethod
    def check_kernel(cls, trial: InterfacePlan) -> Any:
        """Shape a small example in a scratch namespace; raises `HostError` where the kernel refuses.

        The result is passed to `open`.
        """

    @classmethod
    def open(cls, kernel: Any, seed: Callable[[], int]) -> Self:
        """Return the backend of a run; ``seed`` returns the seed of the choices which packets are lost."""
        return cls()

    @classmethod
    def link_problem(cls, link: Link, downlink: Access | None) -> str | None:
        """Return the property of a link that this backend cannot provide, and a remedy."""

    def problem(self, plan: InterfacePlan) -> str | None:
        """Return the part of a plan that this backend cannot provide in the device's namespace, and a remedy."""
        problems = (self.link_problem(line.link, plan.downlink) for line in plan.receivers)
        return next(filter(None, problems), None)

    def apply(self, device: str, old: InterfacePlan | None, new: InterfacePlan) -> None:
        """Set up everything that precedes ``tc``; with an old plan only the differences."""

    def lines(self, old: InterfacePlan | None, new: InterfacePlan) -> list[str]:
        """Return the commands for ``tc -batch``."""
        return []

    def reads(self, plan: InterfacePlan) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the interfaces whose classes are read back, and the (interface, parent) of filters to read back."""
        return [], []

    def differences(self, plan: InterfacePlan, shown: Shown) -> list[str]:
        """Return the differences between the plan and the state of the kernel."""
        return []

    def statistics(self) -> dict[str, Any]:
        """Return measurements for the verdict of a run, such as ``lateness``."""
        return {}

    def reset(self) -> None:
        """Reset these measurements."""

    def forget(self, device: str) -> None:
        """Release a device that has ended."""

    def close(self) -> None:
        """Release everything."""


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
    """Return the name of a backend, or ``auto``; raises `InputError` for any other."""
    if name != AUTO and name not in LINK_BACKENDS:
        raise InputError(f"there is no link backend '{name}': use one of {', '.join((AUTO, *LINK_BACKENDS))}")
    return name


def environment_for(names: Iterable[str]) -> dict[str, str]:
    """Return the environment that brings backends of packages into a container: their packages, as text.

    Raises `InputError` for a package that cannot be used.
    """
    from testbed.common.usercode import code_of_package  # with pydantic, which the shaper's image does not have

    objects: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in names:
        if name in (AUTO, *LINK_BACKENDS.own):
            continue
        found = LINK_BACKENDS.find(name)
        objects[name] = f"{found.__module__}:{found.__qualname__}"
        sources |= code_of_package(found.__qualname__, found.__module__, ()).sources
    if not objects:
        return {}
    packed = json.dumps({"objects": objects, "packages": base64.b64encode(_archive(sources)).decode()})
    if len(packed) > _MOST_BYTES:
        text = f"the package of the link backend '{next(iter(objects))}' is too large for a container's environment"
        raise InputError(f"{text} (more than {_MOST_BYTES:,} bytes compressed): move the backend to a smaller package")
    return {_ENVIRONMENT: packed}


def _archive(sources: Mapping[str, str]) -> bytes:
    """Return modules as a zip archive from which Python imports them."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for module, text in sources.items():
            path = module.replace(".", "/")
            is_package = any(other.startswith(f"{module}.") for other in sources)
            archive.writestr(f"{path}/__init__.py" if is_package else f"{path}.py", text)
    return file.getvalue()


def adopt(environment: Mapping[str, str]) -> None:
    """Register the backends that `environment_for` has put into an environment; raises `HostError`."""
    if _ENVIRONMENT not in environment:
        return
    packed = json.loads(environment[_ENVIRONMENT])
    with tempfile.NamedTemporaryFile(prefix="testbed-backends-", suffix=".zip", delete=False) as file:
        file.write(base64.b64decode(packed["packages"]))
    sys.path.append(str(Path(file.name)))
    LINK_BACKENDS.own |= packed["objects"]
    for name in packed["objects"]:
        try:
            LINK_BACKENDS.find(name)
        except Exception as error:
            text = f"the link backend '{name}' cannot be imported in the shaper: {type(error).__name__}: {error}"
            raise HostError(text) from error
