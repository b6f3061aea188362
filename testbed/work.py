"""The keys of a scenario's `workload`: those of every kind of work, and the registry of the kinds."""

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
GROUP = "testbed.workloads"
"""Entry points under which an installed package registers its workloads: ``task = "module:Class"``."""
_CLASSES = {
    "train": "testbed.ml.learning:Training",
    "infer": "testbed.ml.learning:Inference",
    "program": "testbed.methods.program.workload:Programs",
}
_DEFAULT = "train"
_registered: dict[str, Any] = {}


class MethodPart(ConfigModel):
    """A method by name, with its options (see `testbed show methods`)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="one of `testbed show methods`, or of `file`; further keys are its options")
    file: str | None = Field(
        None,
        description="Python file that defines the method, relative to the scenario file; it is sent to the devices",
    )

    def options(self) -> dict[str, Any]:
        """Return what the method's own options model has to validate."""
        return dict(self.model_extra or {})


class WorkloadPart(ConfigModel):
    """Keys of every workload. Each kind derives its own keys and overrides what the testbed has to know of them."""

    task: str = Field(_DEFAULT, description="what the devices do together")
    method: MethodPart = Field(description="how the work is split")

    progress: ClassVar[str] = "step"
    """The event by which the run progresses; a run without any is not trusted."""
    unit: ClassVar[str] = "step"
    """What users call that."""
    needs_record: ClassVar[bool] = True
    """Whether programs of methods have to record that event themselves."""
    why_not_simulated: ClassVar[str | None] = None
    """Why the work needs containers; None: it runs on either clock."""
    uses_gpu: ClassVar[bool] = False
    """Whether devices may ask for a GPU of the host."""
    counts_links: ClassVar[bool] = True
    """Whether the bytes that each link carries are known."""
    own_programs: ClassVar[bool] = False
    """Whether devices run programs of the user's and not of a method, so other kinds of work are not comparable."""

    def on_containers(self) -> Self:
        """Return the keys as a device in a container is to see them."""
        return self

    @property
    def is_computed(self) -> bool:
        """Whether values are computed, not times alone."""
        return True

    @property
    def is_reproducible(self) -> bool:
        """Whether the work asks for kernels that every processor has."""
        return False

    @property
    def initial_weights(self) -> str | None:
        """Where the state that the work begins with is read from; None: it is drawn from the seed."""
        return None

    @property
    def total(self) -> int | None:
        """The number of units of work that the scenario asks for; None: it depends on something else."""
        return None

    def paths(self) -> Iterator[tuple[str, str | None]]:
        """Yield the keys that name data beside the scenario, which are not copied with it, and their values."""
        return iter(())

    def sources(self) -> Mapping[str, Any]:
        """Return the sub-keys that may name a Python file beside the scenario, each with its ``file`` and ``name``."""
        return {"method": self.method}

    def files(self) -> Iterator[str]:
        """Yield the Python files beside the scenario that sub-keys name, without those of method, model and data."""
        return iter(())

    def title(self) -> str:
        """Return what reports call the work, such as ``pipeline training of cnn on digits``."""
        return f"{self.method.name} {self.task}"

    def labels(self) -> Iterator[str]:
        """Yield the facts in the head of a report."""
        yield self.title()

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Read the keys of the kind that ``task`` names."""
        if cls is not WorkloadPart or not isinstance(value, Mapping):
            return read(value)
        task = value.get("task", _DEFAULT)
        if not isinstance(task, str):
            return read(value)
        if task not in tasks():
            expected = {"expected": ", ".join(map(repr, tasks()))}
            error = {"type": "literal_error", "loc": ("task",), "input": task, "ctx": expected}
            raise ValidationError.from_exception_data(cls.__name__, [error])  # type: ignore[list-item]
        try:
            part: type[Self] = kind(task).Part
        except InputError as error:  # a package that cannot be imported
            raise ValueError(error.text) from None
        return part.model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        if cls is not WorkloadPart:
            return super().__get_pydantic_json_schema__(core_schema, handler)
        parts: dict[type[WorkloadPart], None] = {}
        for task in tasks():
            with suppress(InputError):  # a package that cannot be imported; it is reported where a scenario names it
                parts[kind(task).Part] = None
        for part in parts:
            part.model_rebuild()
        return {"anyOf": [handler(part.__pydantic_core_schema__) for part in parts]}


def tasks() -> tuple[str, ...]:
    """Return the tasks of all kinds of work, those of installed packages among them."""
    return tuple(dict.fromkeys([*_CLASSES, *_registered, *plugins.installed(GROUP)]))


def register(task: str, made: Any) -> None:
    """Use an object as the kind of work of a task: on a device, which has not the package that brings it."""
    _registered[task] = made


def kind(task: str) -> Any:
    """Return the `testbed.workload.Workload` of a task; raises `InputError` naming those there are."""
    return _registered.get(task) or _kind(task)


@cache
def _kind(task: str) -> Any:
    if task in _CLASSES:
        module, _, name = _CLASSES[task].partition(":")
        return getattr(importlib.import_module(module), name)()
    found = plugins.find(GROUP, task, ("task",))
    if found is None:
        raise InputError(f"'{task}' is not possible here: {nearest(task, tasks())}", ("task",))
    return found()
