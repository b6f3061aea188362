"""What the devices of an asynchronous pipeline tell each other, beside `testbed.kits.pipeline.stage`'s messages.

A configuration is prepared, then committed: each stage is told where training goes on from and which units it lacks,
fetches them, and begins once all have theirs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from testbed.kits.layers.shard import State
from testbed.kits.messaging.membership import MEMBERSHIP_KINDS
from testbed.kits.messaging.typed import Fixed, Typed
from testbed.kits.pipeline import stage

Times = Sequence[float | None]
"""Mean seconds of a batch on each stage from one on; None before a stage has done its first."""
Points = Sequence[tuple[int, int]]
"""(configuration that made it, step) of states; see `testbed.kits.asynchronous.replicas.Point`."""


@dataclass(frozen=True)
class Prepare(Typed, kind="configure", opens=True):
    """From the coordinator: get what this stage needs."""

    configuration: int
    stages: Sequence[tuple[str, int, int]]
    """(device, first unit, one after its last), in their order."""
    steps: int
    """Training steps of the whole workload."""
    made: int
    step: int
    """The point to go on from."""
    seeded: bool
    """Whether its units come from the seed, and nothing is fetched."""
    fetch: Mapping[str, Sequence[int]]
    """Units that it lacks, by who has them."""


@dataclass(frozen=True)
class Commit(Typed, kind="commit"):
    """From the coordinator: all stages have what they need. Begin, and free all points but these."""

    configuration: int
    keep: Points


@dataclass(frozen=True)
class Keep(Typed, kind="keep"):
    """From the coordinator: free all points but these and later ones."""

    configuration: int
    keep: Points


@dataclass(frozen=True)
class Fetch(Typed, kind="fetch", opens=True):
    """To any device: send me these units of a point."""

    configuration: int
    made: int
    step: int
    units: Sequence[int]


@dataclass(frozen=True)
class FetchedUnit(Typed, kind="unit"):
    """The answer to a fetch, a message a unit."""

    configuration: int
    made: int
    step: int
    unit: int
    state: State


@dataclass(frozen=True)
class Replica(Typed, kind="replica"):
    """To the next stage, or to the coordinator: keep this for me."""

    configuration: int
    step: int
    unit: int
    state: State


@dataclass(frozen=True)
class Replicated(Typed, kind="replicated"):
    """To the coordinator: the units that I have of this step are where they are to be kept."""

    configuration: int
    step: int


@dataclass(frozen=True)
class BatchActivation(stage.Activation, kind="activation"):
    """A whole batch, in training."""

    first: bool | None = None
    """Whether it begins a stretch of training; not said of other work."""


@dataclass(frozen=True)
class BatchGradient(stage.Gradient, kind="gradient"):
    """Carries beside the gradient what is known of the batch by then."""

    times: Times
    """Of the sender's stage and those after it."""
    loss: Fixed
    """Of the batch."""


@dataclass(frozen=True)
class End(Typed, kind="end", key=("batch",)):
    """To the next stage: this batch and later ones do not come for now. Comes where its activation would."""

    configuration: int
    batch: int

    @property
    def identity(self) -> Hashable:
        """The key of the activation that does not come."""
        return ("train", self.batch, 0)


@dataclass(frozen=True)
class BatchUpdated(Typed, kind="updated", key=("batch",)):
    """From the first stage, whose update is the last of all, to the coordinator on the same device."""

    configuration: int
    batch: int
    times: Times
    loss: Fixed


@dataclass(frozen=True)
class Drained(Typed, kind="drained", key=("sender",)):
    """To the coordinator: all updates before this step are done, and none after it."""

    configuration: int
    step: int


@dataclass(frozen=True)
class Measure(Typed, kind="measure"):
    """From the coordinator: measure your link to another stage."""

    configuration: int
    target: str


@dataclass(frozen=True)
class Deviates(Typed, kind="deviates"):
    """To the coordinator: my link to another stage carries more or less than was measured."""

    configuration: int
    target: str


@dataclass(frozen=True)
class Packet(Typed, kind="packet"):
    """To the stage that the link is measured to; only its size matters."""

    configuration: int


@dataclass(frozen=True)
class Measured(Typed, kind="measured"):
    """To the coordinator: what was measured."""

    configuration: int
    target: str
    rate: float | None
    """Bit/s on the wire; None: sending takes no time."""


KINDS: tuple[type[Typed], ...] = (
    *MEMBERSHIP_KINDS,
    Prepare,
    Commit,
    Keep,
    Fetch,
    FetchedUnit,
    Replica,
    Replicated,
    BatchActivation,
    stage.Labels,
    BatchGradient,
    End,
    BatchUpdated,
    stage.Output,
    Drained,
    Measure,
    Deviates,
    Packet,
    Measured,
)
