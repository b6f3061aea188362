"""The outcome of a run, common to both runtimes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from testbed.network.link import Link
from testbed.trace.events import Event
from testbed.wire import arrays

Status = Literal["finished", "failed", "timed out", "interrupted"]
"""How a run ended."""


UNGATHERED: Collection[Status] = ("failed", "timed out")
"""End statuses for which the results contain the weights of each device, because the coordinator may not have gathered
them."""


def without_coordinator(coordinator: str) -> str:
    """Return the message for a run ended because the coordinator is off."""
    return f"{coordinator} is down; it is the coordinator of the run: end its fault by 'for', or restart it"


def ended(
    status: Status, error: str | None, events: Iterable[Event], *, weights_given: bool
) -> tuple[Status, str | None]:
    """Return the final status and error of an ended run, given the status and error until now.

    A finished run with initial weights (``weights_given``) has failed if its program never loaded them.
    """
    if status != "finished" or not weights_given:
        return status, error
    # Without this check, a user's program that ignores the weights would train from the seed unnoticed.
    if any(event.event == "weights" for event in events):
        return status, error
    return "failed", (
        "the run has initial weights, but the method's program never read them: read context.weights on the plan's "
        "coordinator, or remove the weights"
    )


@dataclass(frozen=True)
class LinkMeasurement:
    """A directed link as requested and as measured before the run."""

    source: str
    destination: str
    requested: Link
    rate: float | None = None
    """Measured rate in bit/s on the wire; None without a measurement."""
    delay: float | None = None
    """Median one-way delay in seconds."""
    loss: float | None = None
    """Fraction of probe packets lost."""
    packets: int = 0
    """Number of probe packets."""
    problem: str | None = None
    """Description of a deviation beyond the tolerance; None without such a deviation."""
    limit: float | None = None
    """Lowest rate in bit/s of the link, the access of both devices, and their cell; None if no rate is limited."""

    @property
    def expected(self) -> Link:
        """The link with the effective rate, which may be limited by access or cell."""
        if self.limit is None:
            return self.requested
        return replace(self.requested, rate=self.limit)

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as plain values."""
        return asdict(self)

    def measured(self) -> dict[str, Any] | None:
        """Return the measured properties as plain values; None without a measurement."""
        properties = {"rate": self.rate, "delay": self.delay, "loss": self.loss}
        if set(properties.values()) == {None}:
            return None
        return {**properties, "packets": self.packets}

    @staticmethod
    def from_json(written: Mapping[str, Any]) -> LinkMeasurement:
        """Parse the output of `to_json`. Raises TypeError for an unknown field."""
        requested = Link.from_json(written["requested"])
        return LinkMeasurement(**{**written, "requested": requested})


@dataclass
class Outcome:
    """A finished run before any evaluation."""

    runtime: Literal["emulate", "simulate"]
    status: Status
    events: Sequence[Event]
    """Events in the order of time."""
    error: str | None = None
    """Error message; None for a run without errors."""
    links: list[LinkMeasurement] = field(default_factory=list)
    """Measurements before the run; empty for a simulation."""
    host: dict[str, Any] = field(default_factory=dict)
    """Facts about the host for the manifest: kernel, processor, link backend, engine, image digests."""
    fidelity: dict[str, Any] = field(default_factory=dict)
    """Measurements for the verdict: processor saturation, queue overflows, delay-line lateness, bytes sent."""
    weights_file: bytes | None = None
    """Final weights of the whole model as safetensors, if exposed by the coordinator."""
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """Model parts by device as safetensors, for a run that ended before the coordinator gathered the whole model."""
    wall_seconds: float = 0.0
    """Duration of the run on the clock of the host."""

    @cached_property
    def weights(self) -> dict[str, Any] | None:
        """The weights of `weights_file` as arrays by name, which require an array library."""
        if self.weights_file is None:
            return None
        # A copy that is writable, since arrays share memory with their bytes.
        return arrays.unpack(bytearray(self.weights_file))
