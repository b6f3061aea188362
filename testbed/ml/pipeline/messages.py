"""Messages between the devices of a pipeline, in synchronous and asynchronous training and in inference.

A configuration is a numbered period with the same stages on the same devices; every message belongs to one. With
recovery from checkpoints, `Configure` makes a device a stage. With recovery from replicas a configuration is prepared,
then committed: each stage receives the point to resume from and the list of its missing units, fetches these units, and
begins once all stages are complete. `testbed.ml.pipeline.placement` explains points.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from testbed.messaging.membership import MEMBERSHIP_KINDS
from testbed.messaging.typed_messages import ConfigurationMessage, Fixed, TypedMessage
from testbed.ml.layers.shard import State
from testbed.ml.lazy import torch
from testbed.ml.pipeline.metrics import FETCHED_UNIT_KIND

Purpose = Literal["train", "evaluate", "infer"]
Stages = Sequence[tuple[str, int, int]]
"""(device, first unit, last unit exclusive) of each stage, in order."""
Times = Sequence[float | None]
"""Mean seconds of a batch on each of several successive stages; None before a stage has done its first batch."""
Points = Sequence[tuple[int, int]]
"""(configuration that made the state, step) for each `testbed.ml.pipeline.placement.Point`."""


@dataclass(frozen=True)
class Configure(ConfigurationMessage, kind="configure", opens=True):
    """From the coordinator: become the receiver's stage in ``stages``."""

    stages: Stages
    steps: int
    """Training steps of the whole workload."""
    given: bool
    """Whether ``state`` contains the state; otherwise the receiver draws its weights from the seed."""
    state: State
    """Weights and optimizer state of the receiver's units."""


@dataclass(frozen=True)
class Prepare(ConfigurationMessage, kind="configure", opens=True):
    """From the coordinator: obtain the state of the receiver's stage in ``stages``."""

    stages: Stages
    steps: int
    """Training steps of the whole workload."""
    made: int
    """The configuration that has made the state to resume from."""
    step: int
    """The batch to resume with; ``made`` and ``step`` are the `testbed.ml.pipeline.placement.Point` to resume from."""
    seeded: bool
    """Whether the receiver draws its weights from the seed, without fetching."""
    fetch: Mapping[str, Sequence[int]]
    """Device -> units to fetch from the device."""
    origins: Sequence[tuple[int, int, Sequence[int]]] | None = None
    """(configuration, step, units) for each other point whose weights some units resume with; None if all units resume
    with the weights of the point above."""


@dataclass(frozen=True)
class Activation(
    ConfigurationMessage, kind="activation", key=("work", "batch", "micro")
):
    """To the next stage, or from the coordinator to the first: inputs of a micro-batch."""

    work: Purpose
    batch: int
    """The training step, or the batch of an evaluation or inference."""
    micro: int
    """Number of the micro-batch in its batch, from 0."""
    micros: int
    """Micro-batches of the batch."""
    samples: int
    """Samples of the whole batch."""
    tensor: torch.Tensor
    """(samples of the micro-batch, ...)"""
    first: bool | None = None
    """Whether the activation begins a stretch, with which an empty pipeline is filled; None except in asynchronous
    training."""


@dataclass(frozen=True)
class Labels(ConfigurationMessage, kind="labels", key=("batch",)):
    """From the coordinator to the last stage: labels of a whole batch, (samples,)."""

    batch: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Gradient(ConfigurationMessage, kind="gradient", key=("batch", "micro")):
    """To the previous stage: the gradient of the loss by the activation that this stage sent."""

    batch: int
    micro: int
    tensor: torch.Tensor
    """(samples of the micro-batch, ...)"""
    times: Times | None = None
    """Times of the sender's stage and of the stages after it, in asynchronous training."""
    loss: Fixed | None = None
    """Loss of the batch, in asynchronous training."""


@dataclass(frozen=True)
class Norms(ConfigurationMessage, kind="norms", key=("batch", "whole")):
    """Gradient norms, for clipping by norm.

    To the previous stage: norms of the sender's and all later stages. To the next stage: norms of all stages.
    """

    batch: int
    whole: bool
    """Whether the norms cover all stages."""
    tensor: torch.Tensor
    """(trained tensors,), in the order of the model"""


@dataclass(frozen=True)
class TiedGradient(
    ConfigurationMessage, kind="tied", key=("sender", "batch", "weight")
):
    """Gradient of a weight shared by several stages.

    To the first of these stages: the sender's gradient. From the first stage to the others: the sum of all gradients.
    """

    batch: int
    weight: int
    """Index in `Model.tied_weights`."""
    tensor: torch.Tensor


@dataclass(frozen=True)
class Output(ConfigurationMessage, kind="output", key=("work", "batch")):
    """From the last stage to the coordinator: outputs of a batch, (samples, ...)."""

    work: Purpose
    batch: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Loss(ConfigurationMessage, kind="loss", key=("batch",)):
    """From the last stage to the coordinator in synchronous training: mean loss of a batch."""

    batch: int
    loss: Fixed


@dataclass(frozen=True)
class Updated(ConfigurationMessage, kind="updated", key=("batch",)):
    """From the first stage, whose update ends the step, to the coordinator on the same device."""

    batch: int
    times: Times | None = None
    """Times of all stages, in asynchronous training."""
    loss: Fixed | None = None
    """Loss of the batch, in asynchronous training."""


@dataclass(frozen=True)
class UnitState(ConfigurationMessage, kind="state"):
    """To the coordinator, for a checkpoint: the state of one unit after a step."""

    step: int
    """Number of steps done, and thus the next step."""
    unit: int
    state: State
    """Weights and optimizer state."""


@dataclass(frozen=True)
class End(ConfigurationMessage, kind="end", key=("batch",)):
    """To the next stage, in place of the activation of ``batch``: the end of a stretch before this batch."""

    batch: int

    @property
    def identity(self) -> Hashable:
        """The key of the activation that the message replaces, so that a stage can wait for either message."""
        return ("train", self.batch, 0)


@dataclass(frozen=True)
class Drained(ConfigurationMessage, kind="drained", key=("sender",)):
    """To the coordinator: the sender has done all updates before ``step``, and none after."""

    step: int


@dataclass(frozen=True)
class Commit(ConfigurationMessage, kind="commit"):
    """From the coordinator: all stages are prepared; begin, and free all points but ``keep``."""

    keep: Points


@dataclass(frozen=True)
class Keep(ConfigurationMessage, kind="keep"):
    """From the coordinator: free all points except ``keep`` and later ones."""

    keep: Points


@dataclass(frozen=True)
class Fetch(ConfigurationMessage, kind="fetch", opens=True):
    """To a device with replicas: send units of a point to the sender."""

    made: int
    """Configuration of the point."""
    step: int
    """Step of the point."""
    units: Sequence[int]


@dataclass(frozen=True)
class FetchedUnit(ConfigurationMessage, kind=FETCHED_UNIT_KIND):
    """The answer to a `Fetch`: the weights and optimizer state of one of the units."""

    made: int
    step: int
    unit: int
    state: State


@dataclass(frozen=True)
class Replica(ConfigurationMessage, kind="replica"):
    """To a later stage, or to the coordinator: keep a replica of one unit after ``step`` batches."""

    step: int
    unit: int
    state: State


@dataclass(frozen=True)
class Replicated(ConfigurationMessage, kind="replicated"):
    """To the coordinator: the replicas of the sender's units after ``step`` batches have reached their keepers."""

    step: int


@dataclass(frozen=True)
class Measure(ConfigurationMessage, kind="measure"):
    """From the coordinator: measure the link to the device ``target``."""

    target: str


@dataclass(frozen=True)
class Deviates(ConfigurationMessage, kind="deviates"):
    """To the coordinator: the rate of the link from the sender to ``target`` deviates from the measured rate."""

    target: str


@dataclass(frozen=True)
class Packet(ConfigurationMessage, kind="packet"):
    """To the device at the other end of a measured link; only the size of the message matters."""


@dataclass(frozen=True)
class Measured(ConfigurationMessage, kind="measured"):
    """To the coordinator: the measured rate of the link from the sender to ``target``."""

    target: str
    rate: float | None
    """Bit/s on the wire; None if sending takes no measurable time."""


FORWARD_KINDS: tuple[type[TypedMessage], ...] = (
    *MEMBERSHIP_KINDS,
    Configure,
    Activation,
    Output,
)
"""Messages of inference."""
SYNCHRONOUS_KINDS: tuple[type[TypedMessage], ...] = (
    *FORWARD_KINDS,
    Labels,
    Gradient,
    Norms,
    TiedGradient,
    UnitState,
    Loss,
    Updated,
)
"""Messages of training with one update a step."""
ASYNCHRONOUS_KINDS: tuple[type[TypedMessage], ...] = (
    *MEMBERSHIP_KINDS,
    Prepare,
    Commit,
    Keep,
    Fetch,
    FetchedUnit,
    Replica,
    Replicated,
    Activation,
    Labels,
    Gradient,
    End,
    Updated,
    Output,
    Drained,
    Measure,
    Deviates,
    Packet,
    Measured,
)
"""Messages of training with an update after every batch."""
