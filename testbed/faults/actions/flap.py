"""Links that go down and come up, over and over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Literal

from pydantic import Field

from testbed.common.quantities import Duration
from testbed.faults.actions.linkset import LinkFault, LinkSetPart
from testbed.faults.conditions import Conditions
from testbed.network.link import Link, Pair


class FlapPart(LinkSetPart):
    """Links that go down and come up again, over and over."""

    down: Duration = Field(gt=0, description="so long they drop everything")
    up: Duration = Field(gt=0, description="so long they work again before they next go down")
    times: int | None = Field(None, ge=1, le=100_000, description="how often; default: until `for`, or the end")


class Flap(LinkFault[FlapPart]):
    """Links drop everything. This is one time that they are down; `turns` says when they are."""

    name = "flap"

    @property
    def takes_no_for(self) -> str | None:
        """Why it cannot be ended after some time: it is known already when it ends."""
        return None if self.value.times is None else "a flap ends after 'times' or after 'for': give one of the two"

    def impair(self, link: Link, pair: Pair, now: Conditions) -> Link:
        """Drop everything."""
        return replace(link, up=False)

    def turns(self, began: float, ends: float) -> Iterator[tuple[Literal["strike", "undo"], float]]:
        """Yield when the links go down (strike) and come up (undo); up is the last. Turns count from the first."""
        part = self.value
        for turn in count() if part.times is None else range(part.times):
            down = began + turn * (part.down + part.up)
            if down >= ends:
                return
            yield "strike", down
            yield "undo", min(ends, down + part.down)
