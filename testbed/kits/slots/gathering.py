"""Results of tests without loss: what devices of the output layer computed and heard, sent to the one that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.messaging.typed import Typed
from testbed.kits.slots.samples import TestRuns
from testbed.models.slices import Channels

PATIENCE = 10
"""Slots of tests after their end in which the device that leads waits for results: a device that is off sends none."""


@dataclass(frozen=True)
class Tested(Typed, kind="tested", key=("step", "test", "sender")):
    """To the device that leads: what came out of one test batch on another device of the output layer."""

    step: int
    """Steps that were trained before."""
    test: int
    results: torch.Tensor
    """Outputs of its own neurons, (samples, classes), and zeros for the others'."""
    right: torch.Tensor
    """Which samples, (samples,), are right by the results that it heard itself."""


class Gathering:
    """One device's side of it, and on the device that leads what is made of all."""

    def __init__(self, mailbox: Mailbox, lead: str, classes: int, scores: TestRuns) -> None:
        """``scores`` counts what was gathered; of a test batch it is told once all of it is there."""
        self._mailbox = mailbox
        self._lead = lead
        self._classes = classes
        self._scores = scores
        self._computed: dict[int, torch.Tensor] = {}
        """By test batch: the outputs of the own neurons, among zeros."""
        self._own: dict[int, Tested] = {}
        """On the device that leads: what it would send to itself."""
        self._sent: list[asyncio.Future[None]] = []

    def computed(self, test: int, own: Channels, outputs: torch.Tensor) -> None:
        """Keep the outputs, (samples, own neurons), of a test batch."""
        results = torch.zeros(len(outputs), self._classes)
        results[:, list(own)] = outputs
        self._computed[test] = results

    def heard(self, step: int, test: int, results: torch.Tensor) -> None:
        """Send on what was computed of a test batch, now that its results, (samples, classes), were heard here."""
        right = results.argmax(dim=1) == torch.from_numpy(self._scores.labels(test))
        message = Tested(step, test, self._computed.pop(test, torch.zeros_like(results)), right)
        if self._mailbox.device.name == self._lead:
            self._own[test] = message
        else:
            self._sent.append(self._mailbox.post(self._lead, message))

    async def sent(self, until: float) -> None:
        """Return when all that was sent has arrived, or an instant, in seconds, has come."""
        if self._sent:
            await asyncio.wait(self._sent, timeout=max(0.0, until - self._mailbox.device.now()))

    async def finish(self, step: int, devices: Collection[str], until: float) -> dict[str, Any]:
        """Return what the tests after a step come to: accuracy, loss and more as `TestRuns.finish`, gathered.

        And ``any``, the share of the samples that at least one device has right by the results that it heard. What has
        not come until an instant, in seconds, counts as zeros.
        """
        right = []
        for test, own in sorted(self._own.items()):
            others = [
                await self._mailbox.take(Tested, (step, test, name), deadline=until)
                for name in devices
                if name != self._lead
            ]
            there: Sequence[Tested] = [own, *(each for each in others if each is not None)]
            self._scores.score(test, torch.stack([each.results for each in there]).sum(dim=0))
            right += torch.stack([each.right for each in there]).any(dim=0).tolist()
        self._own.clear()
        return {**self._scores.finish(), "any": fmean(right)}
