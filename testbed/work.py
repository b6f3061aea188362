"""The `workload` section of a scenario: keys common to all workloads, and the registry of workloads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import (
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from testbed.common import plugins
from testbed.common.errors import InputError, nearest
from testbed.common.part import ConfigModel

MOST_STEPS = 10**9
"""Upper bound of options that count steps, rounds or epochs."""
GROUP = "testbed.workloads"
"""Entry point group of workloads in installed packages: ``task = "module:Class"``."""
# As text, since the core must not import machine learning.
_CLASSES = {
    "train": "testbed.ml.learning:Training",
    "infer": "testbed.ml.learning:Inference",
    "program": "testbed.methods.program.workload:Programs",
}
_DEFAULT = "train"
"""Task of a scenario without the key."""
_registered: dict[str, Any] = {}
"""Workloads of packages that a device has received as source text, by task."""


class MethodPart(ConfigModel):
    """Name and options of a method (see `testbed show methods`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(
        description=(
            "a method of `testbed show methods`, or of `file`; further keys are "
            "options of the method"
        )
    )
    file: str | None = Field(
        None,
        description=(
            "Python file that defines the method, relative to the scenario file; "
            "the file is sent to the devices"
        ),
    )

    def options(self) -> dict[str, Any]:
        """Return the keys to validate with the method's own options model."""
        return dict(self.model_extra or {})


class WorkloadPart(ConfigModel):
    """Keys common to all workloads. Each workload derives a class with further keys and overrides its properties."""

    task: str = Field(_DEFAULT, description="kind of workload")
    method: MethodPart = Field(description="method that divides the work among devices")

    progress: ClassVar[str] = "step"
    """The event by which the run progresses; the verdict rejects a run without such an event."""
    unit: ClassVar[str] = "step"
    """Name of a unit of work in messages to users."""
    needs_record: ClassVar[bool] = True
    """Whether programs have to record the event `progress` themselves."""
    why_not_simulated: ClassVar[str | None] = None
    """Reason why the workload requires containers; None if it also runs on the virtual clock."""
    uses_gpu: ClassVar[bool] = False
    """Whether devices may ask for a GPU of the host."""
    counts_links: ClassVar[bool] = True
    """Whether the number of bytes on each link is known."""
    own_programs: ClassVar[bool] = False
    """Whether devices run the user's programs instead of a method's; such runs are not comparable with other runs."""

    def on_containers(self) -> Self:
        """Return the section for a device in a container."""
        return self

    @property
    def is_computed(self) -> bool:
        """Whether the run computes values, and not only times."""
        return True

    @property
    def is_reproducible(self) -> bool:
        """Whether the workload requests kernels available on every processor."""
        return False

    @property
    def initial_weights(self) -> str | None:
        """File with the initial state; None to draw the state from the seed."""
        return None

    @property
    def total(self) -> int | None:
        """Number of units of work requested; None if the number depends on data."""
        return None

    def paths(self) -> Iterator[tuple[str, str | None]]:
        """Yield the keys and values of data paths beside the scenario, which are not stored with the results."""
        return iter(())

    def sources(self) -> Mapping[str, Any]:
        """Return the subsections for user code, each with the keys ``file`` and ``name``."""
        return {"method": self.method}

    def files(self) -> Iterator[str]:
        """Yield further Python files named by subsections, besides the files of method, model and data."""
        return iter(())

    def title(self) -> str:
        """Return the title of the work in reports, such as ``pipeline training of cnn on digits``."""
        return f"{self.method.name} {self.task}"

    def labels(self) -> Iterator[str]:
        """Yield the facts in the head of a report."""
        yield self.title()

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the section with the class for the value of `task`."""
        # A derived class validates itself, and a value that is not a mapping has another error.
        if cls is not WorkloadPart or not isinstance(value, Mapping):
            return read(value)
        task = value.get("task", _DEFAULT)
        if not isinstance(task, str):
            return read(value)
        if task not in tasks():
            expected = {"expected": ", ".join(map(repr, tasks()))}
            error = {
                "type": "literal_error",
                "loc": ("task",),
                "input": task,
                "ctx": expected,
            }
            raise ValidationError.from_exception_data(cls.__name__, [error])  # type: ignore[list-item]
        try:
            part: type[Self] = find_workload(task).Part
        except InputError as error:
            # The package cannot be imported. Pydantic adds the key only to a ValueError.
            raise ValueError(error.text) from None
        return part.model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        if cls is not WorkloadPart:
            return super().__get_pydantic_json_schema__(core_schema, handler)
        parts: dict[type[WorkloadPart], None] = {}
        for task in tasks():
            # A package that cannot be imported is reported where a scenario names it.
            with suppress(InputError):
                parts[find_workload(task).Part] = None
        for part in parts:
            # The models are built with their first use, and the schema needs them built.
            part.model_rebuild()
        return {"anyOf": [handler(part.__pydantic_core_schema__) for part in parts]}


def tasks() -> tuple[str, ...]:
    """Return the tasks of all workloads, including installed packages."""
    return tuple(dict.fromkeys([*_CLASSES, *_registered, *plugins.installed(GROUP)]))


def register_workload(task: str, workload: Any) -> None:
    """Register a workload object for a task, on a device without the package."""
    _registered[task] = workload


def find_workload(task: str) -> Any:
    """Return the `testbed.workload.Workload` of a task. Raises `InputError` listing the available tasks.

    >>> find_workload("program").name
    'program'
    """
    # Without a cache, because a device may register a workload after the first look-up of its task.
    return _registered.get(task) or _load_workload(task)


@cache
def _load_workload(task: str) -> Any:
    if task in _CLASSES:
        module, _, name = _CLASSES[task].partition(":")
        return getattr(importlib.import_module(module), name)()
    workload = plugins.find(GROUP, task, ("task",))
    if workload is None:
        raise InputError(f"unknown task '{task}': {nearest(task, tasks())}", ("task",))
    return workload()
