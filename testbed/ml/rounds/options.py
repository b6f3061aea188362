"""Options of methods training in rounds, and the resulting length of rounds."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from testbed.common.quantities import Duration, Fraction
from testbed.common.usercode import Code
from testbed.ml.method import Options, StepsOrTime
from testbed.ml.transfer import AS_IT_IS, HOW, RoundsPart, TensorCodec, Way, codecs


class RoundOptions(Options):
    """Conditions for merging models, and the handling of absent or late devices."""

    local_epochs: int | None = Field(
        None,
        ge=1,
        description="epochs of a device in a round, of a workload in epochs; default: 1",
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        description="iterations of a device in a round, of a workload in steps; default: 1",
    )
    round_deadline: Duration | None = Field(
        None,
        description="a round ends then without late devices; default: 10 s, or three times its planned time and its "
        "measured overhead where that is more",
    )
    evaluate_every: StepsOrTime = Field(
        1, description="rounds from one evaluation to the next, or a time"
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
        """Return the codecs of the messages; ``codes`` as in `Problem.codes`."""
        return codecs(codes, weights=self.transfer)


def transfer_of(options: RoundOptions) -> RoundsPart:
    """Return the encoding of messages; unencoded for methods without this option."""
    return options.transfer if isinstance(options, TransferOptions) else AS_IT_IS


class GroupOptions(TransferOptions):
    """Rounds of several devices at once."""

    fraction: Fraction = Field(
        1.0,
        gt=0,
        le=1,
        description="of the devices, drawn for each round",
        json_schema_extra={"default": "100%"},
    )
    min_devices: int = Field(
        1, ge=1, description="minimum updates of a round; a round waits for them"
    )

    def choose(
        self, number: int, present: Sequence[str], draw: random.Random
    ) -> Sequence[str]:
        """Draw a fraction of the present devices."""
        count = max(1, self.min_devices, round(self.fraction * len(present)))
        return present if count >= len(present) else draw.sample(present, count)


SplitPoints = Literal["best"] | int | dict[str, int]
"""One for all devices, or one for each by its name."""

SPLIT = (
    "the layers that a device trains, the first P: one number for all, or `{device: P}`; best: the shortest epoch by "
    "the stage graph"
)


@dataclass(frozen=True)
class Length:
    """Length of a device's rounds in epochs or iterations, and of all rounds together."""

    epochs: bool
    """Whether the two numbers are of epochs; else they are of iterations."""
    each: int
    total: int

    @property
    def rounds(self) -> int:
        """Number of rounds of the workload."""
        return -(-self.total // self.each)

    def iterations(self, number: int, per_epoch: int) -> range:
        """Return the iterations of a round, counted from 0 through all rounds; the last round may be shorter.

        A device training beyond the last round, because others are slower, has further rounds of full length.
        """
        unit = per_epoch if self.epochs else 1
        end = (number + 1) * self.each
        return range(
            number * self.each * unit,
            (end if number >= self.rounds else min(end, self.total)) * unit,
        )
