"""What a runtime hands back when a run is over, whichever runtime it was."""

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
"""Ends of a run of which the weights that single devices hold are kept: the lead may lack them."""


def without_lead(lead: str) -> str:
    """Say what ends a run whose lead is off and stays so."""
    return f"{lead} is down; it leads the run: end its fault by 'for', or restart it"


def ended(
    status: Status, error: str | None, events: Iterable[Event], *, weights_given: bool
) -> tuple[Status, str | None]:
    """Return how a run ended, and why: it failed if it was given weights to begin with that no program took."""
    if status != "finished" or not weights_given or any(event.event == "weights" for event in events):
        return status, error
    return "failed", (
        "weights were given to begin with, but the method's program never read them: read job.weights on the plan's "
        "lead, or leave the weights out"
    )


@dataclass(frozen=True)
class LinkMeasurement:
    """One directed link, as asked for and as found before the run."""

    source: str
    destination: str
    requested: Link
    rate: float | None = None
    """bit/s on the wire; None where it was not measured."""
    delay: float | None = None
    """Median one-way delay in seconds."""
    loss: float | None = None
    """Fraction of probe packets lost."""
    packets: int = 0
    problem: str | None = None
    """Why this link is outside its tolerance."""
    limit: float | None = None
    """Lowest rate on the way in bit/s: the link's, an access's or a cell's; None without any."""

    @property
    def expected(self) -> Link:
        """The link with the rate that applies, which an access or a cell may set."""
        return self.requested if self.limit is None else replace(self.requested, rate=self.limit)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def figures(self) -> dict[str, Any] | None:
        """Return what was found as plain values; None where nothing was measured."""
        found = {"rate": self.rate, "delay": self.delay, "loss": self.loss}
        return None if set(found.values()) == {None} else {**found, "packets": self.packets}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> LinkMeasurement:
        """Return what `to_json` wrote; raises TypeError for a figure that there is not."""
        return LinkMeasurement(**{**found, "requested": Link.from_json(found["requested"])})


@dataclass
class Outcome:
    """A finished run, before anything is computed from it."""

    runtime: Literal["emulate", "simulate"]
    status: Status
    events: Sequence[Event]
    """In the order of time."""
    error: str | None = None
    links: list[LinkMeasurement] = field(default_factory=list)
    host: dict[str, Any] = field(default_factory=dict)
    """Kernel, processor, link backend, engine, image digests: whatever the manifest should hold."""
    fidelity: dict[str, Any] = field(default_factory=dict)
    """Figures that bear on trust: processor saturation, queue overflows, delay-line lateness; bytes that left."""
    weights_file: bytes | None = None
    """Weights of the whole model at the end as safetensors, where the method exposed them on its lead."""
    parts: Mapping[str, bytes] = field(default_factory=dict)
    """Parts of the model by device, as safetensors, of a run that ended before the lead had gathered the whole."""
    wall_seconds: float = 0.0

    @cached_property
    def weights(self) -> dict[str, Any] | None:
        """The weights as arrays; to write them into a file, `weights_file` needs no library of arrays."""
        return None if self.weights_file is None else arrays.unpack(bytearray(self.weights_file))
