"""The `program` workload: the scenario keys of the user's own programs, and their files for the devices.

`testbed.methods.program` runs the programs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Base64Bytes, Field, TypeAdapter, field_validator, model_validator

from testbed.common import formats
from testbed.common.errors import InputError
from testbed.common.part import ConfigModel
from testbed.method import Method, Options, PlanningProblem
from testbed.work import MethodPart, WorkloadPart
from testbed.workload import Workload

if TYPE_CHECKING:
    from testbed.scenario.schema import Scenario

MOST_BYTES = 20_000_000
"""Maximum total size of program files, which are part of the deployment and kept in the device's memory."""
_METHOD = "program"


class ProgramPart(ConfigModel):
    """A command of the user on a device, or on each device of a group."""

    command: tuple[str, ...] = Field(
        min_length=1, description="program and arguments, in the device's container"
    )
    image: str | None = Field(
        None,
        description=(
            "image on the engine, without requirements on its contents; default: "
            "Debian with Python and torch"
        ),
    )
    packages: tuple[str, ...] = Field(
        (),
        description="Python packages in the default image, as pip names them, such as flwr==1.22.0",
    )
    files: tuple[str, ...] = Field(
        (),
        description="files for the program's working directory (read-only), relative to the scenario file",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="environment variables, in addition to RANK and others",
    )
    background: bool = Field(
        False,
        description="for servers: the run does not wait for the end of this program",
    )

    @field_validator("command", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _split_words(cls, value: object) -> object:
        return shlex.split(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_image(self) -> Self:
        if self.image and self.packages:
            raise ValueError(
                "takes one of 'image' and 'packages': an image of your own has its packages"
            )
        return self


def programs_of(workload: WorkloadPart, names: Sequence[str]) -> dict[str, ProgramPart]:
    """Return each device's program; none for other kinds of work."""
    if not isinstance(workload, ProgramWorkloadPart):
        return {}
    return by_device(workload.programs, names)


def by_device(
    written: Mapping[str, ProgramPart], names: Sequence[str]
) -> dict[str, ProgramPart]:
    """Return each device's program in the order of the devices.

    ``written`` are the programs of the scenario by device or group of devices. Raises `InputError` for an unknown name.
    """
    # A `count` names the devices of a group by the group's name and a number.
    groups = {name: name.rstrip("0123456789") for name in names}
    for entry in written:
        if entry not in names and entry not in groups.values():
            raise InputError(
                f"unknown device '{entry}': choose one of {', '.join(names)}",
                ("programs", entry),
            )
    programs = {}
    for name in names:
        # A device's own entry overrides that of its group.
        part = written.get(name) or written.get(groups[name])
        if part is not None:
            programs[name] = part
    return programs


class ProgramWorkloadPart(WorkloadPart):
    """Keys of the user's own programs."""

    task: Literal["program"] = Field("program", description="kind of workload")
    method: MethodPart = Field(
        MethodPart(name=_METHOD), description="always `program`; can be omitted"
    )
    programs: dict[str, ProgramPart] = Field(
        min_length=1,
        description=(
            "programs by device or group of devices (worker for worker1, worker2, ...)"
        ),
    )

    progress: ClassVar[str] = "exit"
    unit: ClassVar[str] = "request"
    needs_record: ClassVar[bool] = False
    why_not_simulated: ClassVar[str | None] = (
        "programs require containers: remove '--runtime simulate'"
    )
    uses_gpu: ClassVar[bool] = True
    counts_links: ClassVar[bool] = False
    own_programs: ClassVar[bool] = True

    @field_validator("method")
    @classmethod
    def _no_other_method(cls, method: MethodPart) -> MethodPart:
        if method != MethodPart(name=_METHOD):
            raise ValueError("the task 'program' has no methods: remove `method`")
        return method

    @model_validator(mode="before")
    @classmethod
    def _refuse_model_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # Results of version 1.0 have the model `none` and keys of training, which are dropped.
        if value.get("model") == {"name": "none"}:
            value = {key: value[key] for key in value.keys() & cls.model_fields.keys()}
        for key in ("epochs", "steps", "requests"):
            if value.get(key) is not None:
                raise ValueError(f"programs end by themselves: remove '{key}'")
        if value.get("reproducible"):
            raise ValueError(
                "'reproducible' has no effect on user programs: remove it, and set 'environment' of the programs"
            )
        return value

    def title(self) -> str:
        """Return the title of the work in reports."""
        return "own programs"

    def labels(self) -> Iterator[str]:
        """Yield the facts in the head of a report."""
        yield "user programs run at the host's speed; only their processors and memory are limited"


@dataclass(frozen=True)
class ProgramsProblem(PlanningProblem[Options]):
    """The planning input of own programs: their files, besides devices and links."""

    workload: ProgramWorkloadPart
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files by their names in the scenario: of all programs; on a device, only of its program (`Method.facts`)."""


class Programs(Workload):
    """Workload of user commands; each device receives only the files of one program."""

    name = "program"
    Part = ProgramWorkloadPart

    def extend_problem(
        self, base_problem: PlanningProblem, scenario: Scenario, method: Method
    ) -> PlanningProblem:
        """Read the files of all programs; raises `InputError`."""
        return _with_files(base_problem, _read_files(scenario))

    def own_facts(self, problem: PlanningProblem) -> Mapping[str, Any]:
        """Return the files of a device's program, to which the method's `facts` has reduced the problem."""
        assert isinstance(problem, ProgramsProblem)
        encoded: Mapping[str, Any] = TypeAdapter(dict[str, Base64Bytes]).dump_python(
            dict(problem.files), mode="json"
        )
        return {"files": encoded}

    def rebuild_problem(
        self, base_problem: PlanningProblem, method: Method, facts: Mapping[str, Any]
    ) -> PlanningProblem:
        """Rebuild the problem of a device with the files of the device's program."""
        return _with_files(
            base_problem,
            TypeAdapter(dict[str, Base64Bytes]).validate_python(facts["files"]),
        )


def _with_files(
    problem: PlanningProblem, files: Mapping[str, bytes]
) -> ProgramsProblem:
    assert isinstance(problem.workload, ProgramWorkloadPart)
    return ProgramsProblem(
        devices=problem.devices,
        links=problem.links,
        workload=problem.workload,
        options=problem.options,
        seed=problem.seed,
        files=files,
    )


def _read_files(scenario: Scenario) -> dict[str, bytes]:
    """Return the files of all programs by name. Raises `InputError`."""
    assert isinstance(scenario.workload, ProgramWorkloadPart)
    contents: dict[str, bytes] = {}
    remaining = MOST_BYTES
    for device, part in scenario.workload.programs.items():
        for name in part.files:
            if name in contents:
                continue
            file = scenario.source.folder / name
            try:
                with file.open("rb") as stream:
                    # One byte more shows that the file is too large, without the whole file in memory.
                    contents[name] = stream.read(remaining + 1)
            except OSError as error:
                text = f"{file} cannot be read ({error.strerror}): name a file, relative to the scenario"
                raise InputError(text, ("programs", device, "files")) from None
            remaining -= len(contents[name])
            if remaining < 0:
                raise InputError(
                    f"the files of all programs are more than {formats.size(MOST_BYTES)}: use an image with them",
                    ("programs",),
                )
    return contents
