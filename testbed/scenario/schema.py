"""The scenario file as pydantic models: every key with its type, default and description.

A class ``...Part`` is the model of one section of the file, with a field for each key; `Scenario` is the whole file.
These models check each key by itself. Relations between keys (a link to an unknown device, more stages than units) are
checked when `Trial` objects, the single runs of a scenario, are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    Tag,
    field_validator,
    model_validator,
)

from testbed.common.errors import Diagnostic, InputError, Key
from testbed.common.part import ConfigModel, Name
from testbed.common.quantities import ByteRate, Duration, Rate, Size, Speed
from testbed.device import Kind, Precision
from testbed.experiment import Experiment
from testbed.faults.parts import FaultPart
from testbed.network.parts import NetworkPart
from testbed.work import WorkloadPart


@dataclass(frozen=True)
class Source:
    """Source positions of the keys of a scenario file."""

    file: str
    """The file name as written by the user."""
    lines: Mapping[Key, int] = field(default_factory=dict)
    """Line of each key and list item, counted from 1."""
    overrides: Mapping[Key, str] = field(default_factory=dict)
    """Keys set outside the file, with the origin of each."""

    @property
    def folder(self) -> Path:
        """Folder to which relative paths in the scenario refer."""
        return Path(self.file).parent

    def _closest_position(self, key: Key) -> Key | None:
        """Return the nearest key of known position: the key itself, a nested key, or an enclosing key."""
        if self._has_position(key):
            return key
        for overridden in self.overrides:
            if overridden[: len(key)] == key:
                return overridden
        for end in range(len(key) - 1, -1, -1):
            if self._has_position(key[:end]):
                return key[:end]
        return None

    def _has_position(self, key: Key) -> bool:
        """Return whether the position of the key itself is known; false inside an overridden key."""
        if key in self.overrides:
            return True
        # Inside an overridden key, lines are those of values that no longer apply.
        if any(key[:end] in self.overrides for end in range(len(key))):
            return False
        return key in self.lines

    def where(self, key: Key) -> str:
        """Return ``file:line`` of the key, or of the closest enclosing key.

        >>> Source("mine.yaml", {(): 1, ("network",): 4}).where(("network", "link"))
        'mine.yaml:4'
        """
        position = self._closest_position(key)
        if position is None:
            return self.file
        return self.overrides.get(position) or f"{self.file}:{self.lines[position]}"

    def override(self, origins: Mapping[Key, str]) -> Source:
        """Return the source with keys, and everything below each key, marked as set by the given origins."""
        return replace(self, overrides={**self.overrides, **origins})

    def error(self, problems: Iterable[Diagnostic]) -> InputError:
        """Return the error for these problems: one line each, in the order of the file."""

        def line_of(problem: Diagnostic) -> int:
            position = self._closest_position(problem.key)
            # Overridden keys have no line in the file and come first.
            return 0 if position is None else self.lines.get(position, 0)

        ordered = sorted(problems, key=line_of)
        lines = [f"{self.where(problem.key)}: {problem}" for problem in ordered]
        # Two checks may find the same problem.
        return InputError("\n".join(dict.fromkeys(lines)))


class WattsPart(ConfigModel):
    """Power consumption of a device."""

    idle: float = Field(ge=0, description="power while idle, in watts")
    busy: float = Field(ge=0, description="power while computing, in watts")

    @property
    def pair(self) -> tuple[float, float]:
        """Return (idle, busy) power, as in `DeviceSpec.watts`."""
        return (self.idle, self.busy)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.busy < self.idle:
            raise ValueError("'busy' must be at least 'idle'")
        return self


class RatesPart(ConfigModel):
    """Processing rates of one kind of layer.

    The times of FLOPs, memory accesses and weights add up; work without a rate takes no time.
    """

    speed: Speed | None = Field(None, gt=0, description="rate for FLOPs")
    memory_rate: ByteRate | None = Field(
        None, gt=0, description="rate for values read and written"
    )
    weight_rate: ByteRate | None = Field(
        None,
        gt=0,
        description=(
            "rate for weights, which a batch of any size reads once, and for the "
            "gradients of weights"
        ),
    )

    @model_validator(mode="after")
    def _check_any_rate(self) -> Self:
        if self.speed is None and self.memory_rate is None and self.weight_rate is None:
            raise ValueError("give at least one of speed, memory_rate, weight_rate")
        return self


class ProfilePart(ConfigModel):
    """A device profile, as written by `testbed setup profile` or in a user's file."""

    name: str = Field("own", description="display name")
    speed: Speed = Field(gt=0, description="speed of each processor")
    memory_rate: ByteRate | None = Field(
        None, gt=0, description="bytes that layers read and write per second"
    )
    kinds: dict[Kind, RatesPart] = Field(
        default_factory=dict,
        description=(
            "rates by kind of layer; `speed` and `memory_rate` apply to all other kinds"
        ),
    )
    precisions: dict[Precision, Speed] = Field(
        default_factory=dict,
        description="speed of layers in f16, in bf16, and with int8 weights, if known",
    )
    memory: Size = Field(gt=0, description="memory of the device")
    processors: int = Field(
        1, ge=1, le=1000, description="number of processors, which compute in parallel"
    )
    watts: WattsPart | None = Field(
        None, description="power consumption, for the metric `energy`"
    )


# The tag selects the form that the user wrote, because pydantic would otherwise report the errors of both forms.
DeviceProfile = Annotated[
    Annotated[str, Tag("[name]")] | Annotated[ProfilePart, Tag("[keys]")],
    Discriminator(
        lambda value: "[keys]" if isinstance(value, dict | ProfilePart) else "[name]"
    ),
]
"""A profile by name or file, or the keys of a profile."""


class DevicePart(ConfigModel):
    """One device, or ``count`` identical devices named ``<name>1`` ... ``<name>N``."""

    profile: DeviceProfile = Field(
        "laptop",
        description=(
            "a profile of `testbed show profiles`, a file of `testbed setup "
            "profile` relative to the scenario file, or the keys of a profile"
        ),
    )
    count: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="number of identical devices, named <name>1 to <name>N",
    )
    speed: Speed | None = Field(
        None,
        gt=0,
        description="overrides the speed of the profile, including its `kinds`",
    )
    memory_rate: ByteRate | None = Field(
        None,
        gt=0,
        description=(
            "bytes that layers read and write per second; this time is added to the "
            "time of the FLOPs. `testbed show models NAME --measure` measures the "
            "rate. Overrides the profile, including its `kinds`. Default: the rate "
            "of the profile; without a rate, memory accesses take no time"
        ),
    )
    processors: int | None = Field(
        None,
        ge=1,
        le=1000,
        description=(
            "number of computations that run in parallel, each at `speed`; default: "
            "from the profile, usually 1"
        ),
    )
    precision: Precision = Field(
        "f32",
        description=(
            "number format of layers. f16, bf16: as in torch's autocast, trained "
            "weights remain float32; int8: 8-bit weights, for inference. The speed "
            "comes from `precisions` of the profile, or `speed`; by default int8 is "
            "as fast as f32"
        ),
    )
    gpu: bool = Field(
        False,
        description=(
            "for user programs: the container has access to the GPUs of the host, "
            "as with docker run --gpus all"
        ),
    )
    memory: Size | None = Field(
        None, gt=0, description="overrides the memory of the profile"
    )
    watts: WattsPart | None = Field(
        None,
        description="power consumption, for the metric `energy`; default: from the profile",
    )
    cpus: float | None = Field(
        None,
        gt=0,
        description="CPU quota of the container (CFS), for workloads without pacing",
    )
    slowdown: float | None = Field(
        None,
        ge=1,
        description=(
            "pacing relative to the host: work takes this multiple of the time that "
            "the host needs. Plans and the simulator use `speed`, which is then "
            "required"
        ),
    )
    access: str | None = Field(
        None,
        description=(
            "a link preset of `testbed show profiles`, e.g. 4g, for the connection "
            "of the device to all others; its rates are the defaults of `uplink` "
            "and `downlink`"
        ),
    )
    uplink: Rate | None = Field(
        None,
        description=(
            "rate limit of all outgoing traffic, in addition to the rates of the links"
        ),
    )
    downlink: Rate | None = Field(
        None,
        description=(
            "rate limit of all incoming traffic, in addition to the rates of the links"
        ),
    )
    position: tuple[float, float] | None = Field(
        None,
        description=(
            "coordinates in metres inside `network.radio.area`; default: drawn from "
            "the seed"
        ),
    )


class MachinePart(ConfigModel):
    """A computer shared by several devices, each a process or container."""

    devices: tuple[Name, ...] = Field(
        (),
        description=(
            "devices on this machine; a name with a `count` means all devices of "
            "the group; default: all devices"
        ),
    )
    cores: float = Field(
        gt=0,
        description=(
            "number of computations that run in parallel, each at the speed of its "
            "device; more computations slow down equally. Plans use the speed of a "
            "device while all devices of the machine compute"
        ),
    )


TOGETHER = "together"
"""Key of a sweep under which several keys change together, instead of in all combinations."""
SweepPart = dict[str, tuple[Any, ...] | dict[str, tuple[Any, ...]]]
"""Dotted key -> values; `TOGETHER` -> a mapping of dotted keys to equally many values.

``{"seed": [1, 2], "together": {"network.link.rate": ["5mbit", "9mbit"], "workload.batch_size": [8, 16]}}`` has four
points: each seed with 5mbit and batches of 8, and with 9mbit and batches of 16.
"""


class ResultsPart(ConfigModel):
    """Optional outputs of each run besides the files in the results folder."""

    to: tuple[Literal["csv", "tensorboard", "mlflow", "wandb"], ...] = Field(
        (),
        description=(
            "outputs of losses, accuracies and latencies during the run, as with "
            "`testbed run --stream`: stream.csv, TensorBoard, MLflow, or Weights & "
            "Biases (offline)"
        ),
    )


class Scenario(ConfigModel):
    """A whole experiment in one file."""

    name: Name = Field(description="name of the scenario and prefix of its runs")
    description: str = Field("", description="description for the report")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of all random numbers")
    devices: dict[Name, DevicePart] = Field(
        min_length=1,
        description="devices by name; in most methods the first one is the coordinator",
    )
    network: NetworkPart = Field(
        default_factory=lambda: NetworkPart(),
        description="topology and properties of links",
    )
    machines: tuple[MachinePart, ...] = Field(
        (),
        description=(
            "computers that several devices share, on the virtual clock; default: "
            "each device is a computer of its own"
        ),
    )
    workload: SerializeAsAny[WorkloadPart] = Field(
        description="the work of the devices"
    )
    faults: tuple[FaultPart, ...] = Field(
        (), description="faults and repairs, with their times or triggers"
    )
    trace: str | tuple[str, ...] = Field(
        (),
        description=(
            "measured changes of links and speeds over time: a CSV file, relative "
            "to the scenario file, or a list of its lines, each `time,what,value`"
        ),
    )
    repetitions: int = Field(
        1, ge=1, description="number of runs of each point, each with a seed of its own"
    )
    sweep: SweepPart | tuple[SweepPart, ...] = Field(
        default_factory=dict,
        description=(
            "dotted keys of this file with lists of values; all combinations run. "
            "Keys under `together` change together. A list of sweeps runs the "
            "points of each. A value written as {label: NAME, value: VALUE} appears "
            "as NAME in tables and plots"
        ),
    )
    points: tuple[dict[str, Any], ...] = Field(
        (),
        description=(
            "further points in addition to `sweep`, each with its own dotted keys "
            "and values, and an optional `label` for tables and plots"
        ),
    )
    expect: dict[str, str] = Field(
        default_factory=dict,
        description="conditions on metrics of metrics.json, e.g. accuracy: '>= 0.9'",
    )
    results: ResultsPart = Field(
        default_factory=lambda: ResultsPart(), description="further outputs of each run"
    )
    time_limit: Duration = Field(
        600.0,
        gt=0,
        description="time after which an unfinished run fails",
        json_schema_extra={"default": "10min"},
    )

    @field_validator("sweep", mode="before")
    @classmethod
    def _check_sweeps(cls, value: object) -> object:
        for sweep in value if isinstance(value, list | tuple) else [value]:
            _check_sweep(sweep)
        return value

    @field_validator("trace", mode="before")
    @classmethod
    def _check_trace(cls, value: object) -> object:
        lines = [value] if isinstance(value, str) else value
        if not isinstance(lines, list | tuple) or any(
            not isinstance(line, str) for line in lines
        ):
            raise ValueError(
                "must be the name of a CSV file, or a list of its lines, each as text"
            )
        return value

    _source: Source = PrivateAttr(default_factory=lambda: Source("the scenario"))

    @property
    def source(self) -> Source:
        """Source positions of the keys; without a file name for a scenario built in memory."""
        return self._source

    def with_source(self, source: Source) -> Self:
        """Return the same scenario with the given source positions."""
        # A copy, since scenarios are frozen and shared by the trials of a sweep.
        scenario = self.model_copy()
        scenario._source = source
        return scenario


def _check_sweep(sweep: object) -> None:
    """Raise ValueError unless the sweep maps keys to lists of values."""
    if not isinstance(sweep, Mapping):
        raise ValueError(
            f"must map dotted keys to lists of values, or be a list of such mappings, not {sweep}"
        )
    together = sweep.get(TOGETHER, {})
    if not isinstance(together, Mapping) or (TOGETHER in sweep and not together):
        raise ValueError(
            f"must map dotted keys to lists of values under '{TOGETHER}', not {together}"
        )
    for key, values in [*sweep.items(), *together.items()]:
        if key != TOGETHER and not isinstance(values, list | tuple):
            raise ValueError(
                f"'{key}' must have a list of values: write {key}: [ ... ]"
            )


@dataclass(frozen=True)
class Trial:
    """One point of a scenario's sweep in one repetition."""

    scenario: Scenario
    """The scenario of this trial, without sweep, with one repetition and the seed of the repetition."""
    experiment: Experiment
    """The same trial as plain values: devices, links, faults and workload."""
    point: dict[str, object]
    """The swept values of this trial by dotted key; empty without a sweep."""
    repetition: int = 0
    """Number of the repetition, counted from 0."""
