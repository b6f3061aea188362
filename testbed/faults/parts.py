"""What a scenario file says about faults: what breaks or mends, where, and when."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from testbed.errors import Key
from testbed.network.parts import LinkPart
from testbed.part import Name, Part
from testbed.quantities import Duration, Speed


class TriggerPart(Part):
    """A moment of the training: 'when worker1 begins backward of batch 205'."""

    device: Name = Field(description="whose moment it is")
    begins: str | None = Field(None, description="name of a span, e.g. forward, backward, update")
    event: str | None = Field(None, description="name of a recorded event, e.g. recovery")
    batch: int | None = Field(None, ge=0, description="of this batch, counted from 0; default: the first to come")
    micro: int | None = Field(None, ge=0, description="of this micro-batch, counted from 0 in its batch")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.begins is None) == (self.event is None):
            raise ValueError("say either what the device 'begins' or which 'event' it records")
        return self


class TargetPart(Part):
    """The links that a fault strikes: one pair, or all links of a device."""

    between: tuple[Name, Name] | None = Field(None, description="both directions between two devices")
    from_: Name | None = Field(None, alias="from", description="sender, of one direction")
    to: Name | None = Field(None, description="receiver, of one direction")
    device: Name | None = Field(None, description="every link from and to this device")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        named = [self.between is not None, self.from_ is not None and self.to is not None, self.device is not None]
        if sum(named) != 1:
            raise ValueError("name the links with one of 'between', 'from' and 'to', or 'device'")
        return self

    def touches(self, pair: tuple[str, str]) -> bool:
        """Return whether this directed link is among those meant."""
        if self.device is not None:
            return self.device in pair
        if self.between is not None:
            return pair in (self.between, self.between[::-1])
        return pair == (self.from_, self.to)

    def target(self) -> str:
        """Say which links are meant."""
        if self.between is not None:
            return " <-> ".join(self.between)
        return self.device or f"{self.from_} -> {self.to}"

    def named(self) -> list[tuple[Key, str]]:
        """Return every device named, with the key that names it."""
        single = (("from", self.from_), ("to", self.to), ("device", self.device))
        named: list[tuple[Key, str]] = [((key,), name) for key, name in single if name is not None]
        return [*named, *((("between", place), name) for place, name in enumerate(self.between or ()))]


class DegradePart(TargetPart, LinkPart):
    """The links to make worse, and their new figures."""


class FlapPart(TargetPart):
    """Links that go down and come up again, over and over."""

    down: Duration = Field(gt=0, description="so long they drop everything")
    up: Duration = Field(gt=0, description="so long they work again before they next go down")
    times: int | None = Field(None, ge=1, le=100_000, description="how often; default: until `for`, or the end")


class ThrottlePart(Part):
    """A device that computes more slowly than its own speed."""

    device: Name = Field(description="which one")
    speed: Speed | None = Field(None, gt=0, description="compute at this speed")
    slowdown: float | None = Field(None, ge=1, le=1e6, description="take so many times as long")

    @model_validator(mode="after")
    def _one_figure(self) -> Self:
        if (self.speed is None) == (self.slowdown is None):
            raise ValueError("say how slow with exactly one of 'speed' and 'slowdown'")
        return self


class FaultPart(Part):
    """One thing that breaks or mends, and when.

    Exactly one action; at most one of ``at`` (seconds after the start of the workload), ``when`` (an event of
    the training) and ``after`` (seconds after the fault before it in the file).
    """

    kill: Name | None = Field(None, description="the device ends at once, its memory is lost")
    restart: Name | None = Field(None, description="a killed device boots again")
    pause: Name | None = Field(None, description="the device stands still, its memory is kept")
    resume: Name | None = Field(None, description="a paused device goes on")
    partition: tuple[tuple[Name, ...], ...] | None = Field(
        None, description="groups that cannot reach each other; devices not named form one more group"
    )
    degrade: DegradePart | None = Field(None, description="links take other figures")
    flap: FlapPart | None = Field(None, description="links go down and come up, over and over")
    heal: Literal["all"] | None = Field(None, description="undo every partition and degradation, end every flap")
    throttle: ThrottlePart | None = Field(None, description="a device computes more slowly, as when it is hot")
    unthrottle: Name | None = Field(None, description="a throttled device has its own speed again")
    at: Duration | None = Field(None, description="time since the start of the workload")
    when: TriggerPart | None = Field(None, description="a moment of the training")
    after: Duration | None = Field(None, description="time since the fault before it in the file struck")
    for_: Duration | None = Field(None, alias="for", description="undone after this time")

    ACTIONS: ClassVar[tuple[str, ...]] = (
        "kill",
        "restart",
        "pause",
        "resume",
        "partition",
        "degrade",
        "flap",
        "heal",
        "throttle",
        "unthrottle",
    )
    MENDING: ClassVar[tuple[str, ...]] = ("restart", "resume", "heal", "unthrottle")

    @property
    def action(self) -> str:
        """The name of the one action given."""
        return next(name for name in self.ACTIONS if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _one_action_one_time(self) -> Self:
        actions = [name for name in self.ACTIONS if getattr(self, name) is not None]
        if len(actions) != 1:
            raise ValueError("a fault has exactly one of " + ", ".join(self.ACTIONS))
        if sum(value is not None for value in (self.at, self.when, self.after)) != 1:
            raise ValueError("a fault strikes at exactly one of 'at', 'when' and 'after'")
        if self.for_ is not None and actions[0] in self.MENDING:
            raise ValueError(f"'{actions[0]}' mends something: it takes no 'for'")
        if self.for_ is not None and self.flap is not None and self.flap.times is not None:
            raise ValueError("a flap ends after 'times' or after 'for': give one of the two")
        return self
