"""Actions on links: degradations, obstacles, flapping, network partitions, and healing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, count
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator

from testbed.common.errors import Key
from testbed.common.part import ConfigModel, Name
from testbed.common.quantities import Duration
from testbed.faults.conditions import FaultAction, FaultContext, FaultPhase, SystemState
from testbed.network import checks
from testbed.network.link import Link, Pair
from testbed.network.parts import (
    PRESETS,
    PROPERTIES,
    LinkPart,
    explicit_properties,
    overlay,
)


class LinkSetPart(ConfigModel):
    """One link, both directions between two devices, or all links of a device."""

    between: tuple[Name, Name] | None = Field(
        None, description="two devices, for both directions"
    )
    from_: Name | None = Field(
        None, alias="from", description="sender, for one direction"
    )
    to: Name | None = Field(None, description="receiver, for one direction")
    device: Name | None = Field(None, description="all links from and to this device")

    @model_validator(mode="after")
    def _check_one_target(self) -> Self:
        targets = [
            self.between is not None,
            self.from_ is not None and self.to is not None,
            self.device is not None,
        ]
        if sum(targets) != 1 or (self.from_ is None) != (self.to is None):
            raise ValueError(
                "name the links with one of 'between', 'from' and 'to', or 'device'"
            )
        return self

    def touches(self, pair: Pair) -> bool:
        """Return whether a directed link belongs to the set."""
        if self.device is not None:
            return self.device in pair
        if self.between is not None:
            return pair in (self.between, self.between[::-1])
        return pair == (self.from_, self.to)

    @property
    def target(self) -> str:
        """The links as text, such as ``a <-> b``."""
        if self.between is not None:
            return " <-> ".join(self.between)
        return self.device or f"{self.from_} -> {self.to}"

    def named(self) -> list[tuple[Key, str]]:
        """Return every named device with its key."""
        named: list[tuple[Key, str]] = []
        single = {"from": self.from_, "to": self.to, "device": self.device}
        for key, name in single.items():
            if name is not None:
                named.append(((key,), name))
        for place, name in enumerate(self.between or ()):
            named.append((("between", place), name))
        return named

    def missing_link(self, links: Collection[Pair]) -> str | None:
        """Return the description of the named link if the network lacks it; None for links of a device."""
        if self.device is not None:
            return None
        pair = self.between or (str(self.from_), str(self.to))
        if pair in links:
            return None
        return f"there is no link from '{pair[0]}' to '{pair[1]}'"


L = TypeVar("L", bound=LinkSetPart)


class LinkFault(FaultAction[L]):
    """Base of actions on a set of links."""

    @property
    def target(self) -> str:
        """The links."""
        return self.value.target

    def named(self) -> list[tuple[Key, str]]:
        """Return the ends of the links."""
        return self.value.named()

    def problems(self, context: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield an error for a missing link."""
        text = self.value.missing_link(context.links)
        if text is not None:
            yield (), f"{text} to {self.name}"

    def touches(self, pair: Pair) -> bool:
        """Return whether a link belongs to the set."""
        return self.value.touches(pair)


class DegradePart(LinkSetPart, LinkPart):
    """The links to change, and the properties to override."""


class Degrade(LinkFault[DegradePart]):
    """Override properties of links; if several degradations of a link set a property, the latest decides."""

    name = "degrade"
    summary = "override link properties (rate, delay, loss, ...)"
    schema = DegradePart

    def problems(self, context: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield errors for missing links and for unknown or impossible properties."""
        part = self.value
        yield from super().problems(context)
        if part.preset is None and not explicit_properties(part):
            yield (
                (),
                f"has no effect: set at least one of preset, {', '.join(PROPERTIES)}",
            )
        if part.preset is not None and part.preset not in PRESETS:
            yield (
                ("preset",),
                f"unknown preset '{part.preset}': use one of {', '.join(PRESETS)}",
            )
            return
        # A mesh of a thousand devices has a million pairs, which share few `Link` objects: each object is checked once.
        distinct: dict[int, Link] = {}
        for pair, link in chain(context.links.items(), context.traced):
            if part.touches(pair):
                distinct[id(link)] = link
        for link in distinct.values():
            # The direction does not matter here, since a preset's rates and delays are valid in both directions.
            degraded = overlay(link, part, is_from_first=True)
            for name, text in checks.problems(degraded):
                key = name.partition(".")[0]
                # The invalid property may be the link's own, if it contradicts a property of the fault.
                yield (key,) if getattr(part, key) is not None else (), text

    def impair(self, link: Link, pair: Pair, state: SystemState) -> Link:
        """Override the link's properties with the properties given for the fault."""
        return overlay(link, self.value, state.is_from_first(pair))


class ObstructPart(LinkSetPart):
    """Radio links whose signal fades faster with distance."""

    path_loss_exponent: float = Field(
        gt=0,
        description=(
            "path loss exponent of these links, above that of the radio; 6 is a "
            "long-term failure"
        ),
    )


class Obstruct(LinkFault[ObstructPart]):
    """Raise the path loss exponent of radio links, and thus the loss of broadcasts.

    An obstruction never reduces the loss; among several obstructions of a link, the highest exponent decides.
    """

    name = "obstruct"
    summary = "links over the air fade faster with distance"
    schema = ObstructPart

    def problems(self, context: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield errors for missing links and for an exponent without effect."""
        yield from super().problems(context)
        if context.radio is None:
            yield (
                (),
                "requires `network.radio`: define a radio, or degrade the links' message_loss",
            )
            return
        own = context.radio.propagation.path_loss_exponent
        if self.value.path_loss_exponent <= own:
            yield (
                ("path_loss_exponent",),
                f"must be above the radio's own exponent, {own:g}: use a higher one",
            )

    def impair(self, link: Link, pair: Pair, state: SystemState) -> Link:
        """Raise the loss to the share of packets arriving too weak for the receiver."""
        assert state.radio is not None, "`problems` has refused a missing radio"
        loss = 1 - state.radio.reception_ratio(pair, self.value.path_loss_exponent)
        return replace(link, message_loss=max(link.message_loss, loss))


class FlapPart(LinkSetPart):
    """Links going down and up repeatedly."""

    down: Duration = Field(gt=0, description="duration of each outage")
    up: Duration = Field(gt=0, description="duration between two outages")
    times: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="number of outages; default: until `for`, or the end of the run",
    )


class Flap(LinkFault[FlapPart]):
    """Repeated outages of links. The action in force is one outage; `turns` yields the schedule."""

    name = "flap"
    summary = "links go down and come up, over and over"
    schema = FlapPart

    @property
    def reason_against_for(self) -> str | None:
        """Reason why the action has no duration: the schedule already has an end."""
        if self.value.times is None:
            return None
        return "a flap ends after 'times' or after 'for': give one of the two"

    def impair(self, link: Link, pair: Pair, state: SystemState) -> Link:
        """Drop all packets."""
        return replace(link, up=False)

    def turns(self, began: float, ends: float) -> Iterator[tuple[FaultPhase, float]]:
        """Yield the instants at which the links go down (strike) and come up (undo); the last one is an undo."""
        part = self.value
        for turn in count() if part.times is None else range(part.times):
            # Every outage is timed from the first one, so that delays do not add up.
            outage_start = began + turn * (part.down + part.up)
            if outage_start >= ends:
                return
            yield "strike", outage_start
            yield "undo", min(ends, outage_start + part.down)


class NetworkPartition(FaultAction[tuple[tuple[str, ...], ...]]):
    """Restrict communication to groups of devices; unnamed devices form one further group."""

    name = "partition"
    summary = (
        "groups that cannot reach each other; devices not named form one more group"
    )
    schema = tuple[tuple[Name, ...], ...]

    @property
    def target(self) -> str:
        """The groups."""
        return " | ".join(",".join(group) for group in self.value)

    def named(self) -> list[tuple[Key, str]]:
        """Return the members of all groups."""
        named: list[tuple[Key, str]] = []
        for number, group in enumerate(self.value):
            for place, name in enumerate(group):
                named.append(((number, place), name))
        return named

    def problems(self, context: FaultContext) -> Iterator[tuple[Key, str]]:
        """Yield errors for devices named twice and for groups without effect."""
        listed = Counter(chain.from_iterable(self.value))
        for name in sorted(listed):
            if listed[name] > 1:
                yield (), f"'{name}' is named twice: a device is in one group"
        # Empty groups do not count.
        group_count = sum(map(bool, self.value))
        # Unnamed devices are one more group.
        if len(listed) < len(context.devices):
            group_count += 1
        if group_count < 2:
            yield (
                (),
                "has no effect: name at least two groups, or remove devices from the only one",
            )

    @cached_property
    def _group_of_device(self) -> dict[str, int]:
        groups: dict[str, int] = {}
        for number, names in enumerate(self.value):
            groups |= dict.fromkeys(names, number)
        return groups

    def touches(self, pair: Pair) -> bool:
        """Return whether the two devices are in different groups."""
        groups = self._group_of_device
        # Unnamed devices are in group -1.
        return groups.get(pair[0], -1) != groups.get(pair[1], -1)

    def impair(self, link: Link, pair: Pair, state: SystemState) -> Link:
        """Drop all packets."""
        return replace(link, up=False)


class Heal(FaultAction[str]):
    """Undo every partition, degradation and obstruction, and end every flap."""

    name = "heal"
    summary = "undo every partition, degradation and obstruction, end every flap"
    schema = Literal["all"]
    undoes = (NetworkPartition.name, Degrade.name, Obstruct.name, Flap.name)

    def named(self) -> list[tuple[Key, str]]:
        """Return no devices: the action targets all."""
        return []
