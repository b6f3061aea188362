"""Two ways to be surer of what arrives: to ask the others of a layer, and to lose no results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.exchange import Placement
from testbed.kits.slots.messages import Losses, Outputs
from testbed.kits.slots.missing import Arrived
from testbed.kits.slots.recovery import Transmit
from testbed.methods.versatile.messages import Complete


class Confirming:
    """Tells the others of a layer, and waits a moment for what they tell, in the way of `kits.slots.missing.Confirm`.

    What they tell is lost as any cast; then they count as without.
    """

    def __init__(self, mailbox: Mailbox, placement: Placement, wait: float, results: bool, losses: bool) -> None:
        """``wait`` is in seconds; ``results`` and ``losses`` say of which it matters."""
        self._mailbox = mailbox
        self._placement = placement
        self._wait = wait
        self._results = results
        self._losses = losses

    async def __call__(self, layer: int, arrived: Arrived) -> Arrived:
        """Return what has arrived for one's own neurons of a layer, with what is known of the others."""
        matters = self._results if arrived.layer == layer else self._losses
        me = self._mailbox.device.name
        others = [name for name in self._placement.holders(layer) if name != me]
        if not matters or not arrived.complete or not others:
            return arrived
        await self._mailbox.cast(others, Complete(arrived.batch, layer))
        deadline = self._mailbox.device.now() + self._wait
        found = [await self._mailbox.take(Complete, (arrived.batch, layer, name), deadline=deadline) for name in others]
        self._mailbox.expire(Complete, (arrived.batch,))
        return replace(arrived, others=None not in found)


class Ideal:
    """Casts as another `Transmit` does, but for the results that the output layer shares: none of these is lost."""

    def __init__(self, mailbox: Mailbox, transmit: Transmit, output: int) -> None:
        """``output``: the number of the output layer."""
        self._mailbox = mailbox
        self._transmit = transmit
        self._output = output
        self.heard = transmit.heard

    async def __call__(self, receivers: Sequence[str], message: Outputs | Losses, until: float) -> None:
        """Cast, or send reliably."""
        if not isinstance(message, Outputs) or message.layer != self._output:
            await self._transmit(receivers, message, until)
            return
        for receiver in receivers:
            self._mailbox.post(receiver, message)
