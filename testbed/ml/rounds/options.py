"""Options of methods that train in rounds, and the number of iterations of a round."""

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
from testbed.ml.transfer import (
    ENCODING_HELP,
    UNENCODED,
    Encoding,
    RoundEncodingPart,
    TensorCodec,
    make_codecs,
)


class RoundOptions(Options):
    """Options of every method training in rounds: the length of a round, and the wait for late devices."""

    local_epochs: int | None = Field(
        None,
        ge=1,
        description=(
            "epochs that a device trains in a round, if the workload has epochs; "
            "default: 1"
        ),
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        description=(
            "iterations that a device trains in a round, if the workload has steps; "
            "default: 1"
        ),
    )
    round_deadline: Duration | None = Field(
        None,
        description=(
            "time after which a round ends without late devices; default: three times "
            "the planned time of a round, plus the measured overhead, but at least 10 s"
        ),
    )
    evaluate_every: StepsOrTime = Field(
        1, description="interval between evaluations: a number of rounds, or a time"
    )


class TransferOptions(RoundOptions):
    """Options of methods with a server, whose messages can be encoded."""

    transfer: RoundEncodingPart = Field(
        RoundEncodingPart(),
        description="encoding of messages between devices and server",
    )


class PeerOptions(RoundOptions):
    """Options of methods without a server, whose devices send each other weights in messages of the kind ``weights``.

    `codecs` returns the encoding of these messages for the devices' mailboxes.
    """

    transfer: Encoding = Field(
        "f32", description=f"encoding of weights: {ENCODING_HELP}"
    )

    def codecs(self, codes: Mapping[str, Code]) -> dict[str, TensorCodec]:
        """Return the codecs of the messages; ``codes`` are user-defined codecs (`PlanningProblem.codes`)."""
        return make_codecs(codes, weights=self.transfer)


def transfer_of(options: RoundOptions) -> RoundEncodingPart:
    """Return the encoding of messages between devices and a server.

    Options of methods without a server have no such encoding; see `PeerOptions.codecs`.
    """
    if isinstance(options, TransferOptions):
        return options.transfer
    return UNENCODED


class GroupOptions(TransferOptions):
    """Options of methods drawing some of the devices for each round."""

    fraction: Fraction = Field(
        1.0,
        gt=0,
        le=1,
        description="fraction of the devices that is drawn for each round",
        json_schema_extra={"default": "100%"},
    )
    min_devices: int = Field(
        1, ge=1, description="number of updates without which a round does not end"
    )

    def choose(
        self, number: int, present: Sequence[str], draw: random.Random
    ) -> Sequence[str]:
        """Draw a fraction of the ``present`` devices, but at least `min_devices`; implements the hook `Choose`.

        ``draw`` is the generator of this round. The ``number`` of the round is unused.
        """
        fraction_count = round(self.fraction * len(present))
        count = max(1, self.min_devices, fraction_count)
        if count >= len(present):
            return present
        return draw.sample(present, count)


SplitPoints = Literal["best"] | int | dict[str, int]
"""Value of an option with a number for each device: one number for all devices, a number by device name, or ``best``,
which leaves the choice to the planner."""

SPLIT_HELP = (
    "number P of layers, from the first, that a device trains: one P for all, or `{device: P}`; best: the P with the "
    "shortest predicted epoch"
)


@dataclass(frozen=True)
class RoundLength:
    """Length of one round of a device and of all rounds together, in epochs or iterations."""

    counts_epochs: bool
    """Whether both numbers count epochs; otherwise they count iterations."""
    per_round: int
    """Epochs or iterations of a round."""
    total: int
    """Epochs or iterations of all rounds."""

    @property
    def rounds(self) -> int:
        """Number of rounds of the workload.

        >>> RoundLength(counts_epochs=True, per_round=2, total=3).rounds
        2
        """
        return math.ceil(self.total / self.per_round)

    def iterations(self, number: int, per_epoch: int) -> range:
        """Return the iterations of a round, counted from 0 through all rounds; the last round may be shorter.

        A number after the last round is possible, since a method may let fast devices train on while the server waits
        for others; these rounds have full length.

        >>> RoundLength(counts_epochs=True, per_round=2, total=3).iterations(number=1, per_epoch=10)
        range(20, 30)
        """
        start = number * self.per_round
        stop = start + self.per_round
        if number < self.rounds:
            stop = min(stop, self.total)
        if self.counts_epochs:
            return range(start * per_epoch, stop * per_epoch)
        return range(start, stop)
