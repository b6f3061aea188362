"""Something in the way of radio waves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pydantic import Field

from testbed.common.errors import Key
from testbed.faults.actions.linkset import LinkFault, LinkSetPart
from testbed.faults.conditions import Conditions
from testbed.faults.setting import Setting
from testbed.network.link import Link, Pair


class ObstructPart(LinkSetPart):
    """Links over the air that fade faster with distance."""

    path_loss_exponent: float = Field(
        gt=0, description="of these links, above the radio's own; 6 is a long-lasting failure"
    )


class Obstruct(LinkFault[ObstructPart]):
    """The path loss exponent of links rises, and with it what they lose of casts.

    A link loses no less than it did: of several obstructions the highest exponent counts.
    """

    name = "obstruct"

    def problems(self, setting: Setting) -> Iterator[tuple[Key, str]]:
        """Yield links that are not there, and an exponent that raises nothing."""
        yield from super().problems(setting)
        if setting.radio is None:
            yield (), "there is no radio to obstruct: give `network.radio`, or degrade the links' message_loss"
        elif self.value.path_loss_exponent <= (own := setting.radio.propagation.path_loss_exponent):
            yield ("path_loss_exponent",), f"is no more than the radio's own, {own:g}: use a higher one"

    def impair(self, link: Link, pair: Pair, now: Conditions) -> Link:
        """Lose what arrives too weak."""
        assert now.radio is not None, "checked before the run"
        lost = 1 - now.radio.reception_ratio(pair, self.value.path_loss_exponent)
        return replace(link, message_loss=max(link.message_loss, lost))
