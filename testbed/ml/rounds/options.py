"""Options of methods training in rounds, and the resulting length of rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from testbed.common.quantities import Duration, Fraction
from testbed.common.usercode import Code
from testbed.ml.method import Options, StepsOrTime
from testbed.ml.transfer import AS_IT_IS, HOW, RoundsPart, TensorCodec, Way, make_codecs


class RoundOptions(Options):
    """Options of every method in rounds: when the server merges models, and how long it waits for devices."""

    local_epochs: int | None = Field(
        None,
        ge=1,
        description="epochs of a device in a round, if the workload has epochs; default: 1",
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        description=(
            "iterations of a device in a round, if the workload has steps; default: 1"
        ),
    )
    round_deadline: Duration | None = Field(
        None,
        description=(
            "time after which a round ends without late devices; default: 10 s, or "
            "three times the planned time plus the measured overhead if this is "
            "longer"
        ),
    )
    evaluate_every: StepsOrTime = Field(
        1, description="interval between evaluations, in rounds or time"
    )


class TransferOptions(RoundOptions):
    """Round options with the encoding of messages."""

    transfer: RoundsPart = Field(
        RoundsPart(), description="encoding of messages between devices and server"
    )


class PeerOptions(RoundOptions):
    """Rounds without a server, whose devices send each other messages of the kind ``weights``."""

    transfer: Way = Field("f32", description=f"how weights travel: {HOW}")

    def codecs(self, codes: Mapping[str, Code]) -> dict[str, TensorCodec]:
        """Return the codecs of the messages; ``codes`` as in `PlanningProblem.codes`."""
        return make_codecs(codes, weights=self.transfer)


def transfer_of(options: RoundOptions) -> RoundsPart:
    """Return the encoding of messages that the options ask for; no encoding for methods without the option."""
    if isinstance(options, TransferOptions):
        return options.transfer
    return AS_IT_IS


class GroupOptions(TransferOptions):
    """Rounds of several devices at once."""

    fraction: Fraction = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of the devices that is drawn for each round",
        json_schema_extra={"default": "100%"},
    )
    min_devices: int = Field(
        1, ge=1, description="minimum updates of a round; a round waits for them"
    )

    def choose(
        self, number: int, present: Sequence[str], draw: random.Random
    ) -> Sequence[str]:
        """Draw a fraction of the present devices, at least one; a hook `testbed.ml.rounds.rounds.Choose`."""
        wanted = round(self.fraction * len(present))
        count = max(1, self.min_devices, wanted)
        if count >= len(present):
            return present
        return draw.sample(present, count)


SplitPoints = Literal["best"] | int | dict[str, int]
"""One number for all devices, or one for each device by name; best: chosen by the planner."""

SPLIT = (
    "the layers that a device trains, the first P: one number for all, or `{device: P}`; best: the shortest epoch by "
    "the stage graph"
)


@dataclass(frozen=True)
class Length:
    """Length of a device's rounds in epochs or iterations, and of all rounds together."""

    epochs: bool
    """Whether the two numbers count epochs; otherwise they count iterations."""
    each: int
    """Epochs or iterations of a round."""
    total: int
    """Epochs or iterations of all rounds."""

    @property
    def rounds(self) -> int:
        """Number of rounds of the workload.

        >>> Length(epochs=True, each=2, total=3).rounds
        2
        """
        return math.ceil(self.total / self.each)

    def iterations(self, number: int, per_epoch: int) -> range:
        """Return the iterations of a round, counted from 0 through all rounds; the last round may be shorter.

        A device training beyond the last round, because others are slower, has further rounds of full length.

        >>> Length(epochs=True, each=2, total=3).iterations(number=1, per_epoch=10)
        range(20, 30)
        """
        first = number * self.each
        last = first + self.each
        if number < self.rounds:
            last = min(last, self.total)
        # Both ends count epochs or iterations, as the length does.
        iterations_each = per_epoch if self.epochs else 1
        return range(first * iterations_each, last * iterations_each)
