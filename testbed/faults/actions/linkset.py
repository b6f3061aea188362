"""Which links an action concerns."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Self, TypeVar

from pydantic import Field, model_validator

from testbed.common.errors import Key
from testbed.common.part import Name, Part
from testbed.faults.conditions import FaultAction
from testbed.faults.setting import Setting
from testbed.network.link import Pair


class LinkSetPart(Part):
    """One link, both directions between two devices, or all links of a device."""

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

    def touches(self, pair: Pair) -> bool:
        """Return whether a directed link is among them."""
        if self.device is not None:
            return self.device in pair
        if self.between is not None:
            return pair in (self.between, self.between[::-1])
        return pair == (self.from_, self.to)

    @property
    def target(self) -> str:
        """Which links, in words."""
        if self.between is not None:
            return " <-> ".join(self.between)
        return self.device or f"{self.from_} -> {self.to}"

    def named(self) -> list[tuple[Key, str]]:
        """Return every device named, with the key that names it."""
        single = (("from", self.from_), ("to", self.to), ("device", self.device))
        named: list[tuple[Key, str]] = [((key,), name) for key, name in single if name is not None]
        return [*named, *((("between", place), name) for place, name in enumerate(self.between or ()))]

    def absent(self, links: Collection[Pair]) -> Iterator[str]:
        """Say which link is meant that is not there."""
        if self.device is None:
            pair = self.between or (str(self.from_), str(self.to))
            if pair not in links:
                yield f"there is no link from '{pair[0]}' to '{pair[1]}'"


L = TypeVar("L", bound=LinkSetPart)


class LinkFault(FaultAction[L]):
    """Something that happens to such links."""

    @property
    def target(self) -> str:
        """The links."""
        return self.value.target

    def named(self) -> list[tuple[Key, str]]:
        """Return the ends of the links."""
        return self.value.named()

    def problems(self, setting: Setting) -> Iterator[tuple[Key, str]]:
        """Yield links that are not there."""
        for text in self.value.absent(setting.links):
            yield (), f"{text} to {self.name}"

    def touches(self, pair: Pair) -> bool:
        """Return whether a link is among those named."""
        return self.value.touches(pair)
