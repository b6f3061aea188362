"""EdgePipe's program, and its one rule (Section V-B): what has not arrived is treated as null."""

from __future__ import annotations

import torch

from testbed.device import Device
from testbed.kits.layers.layer_shard import LayerShard
from testbed.kits.messaging.mailbox import Mailbox
from testbed.kits.slots.casts import CASTS
from testbed.kits.slots.missing import Arrived, Usable, Work, back
from testbed.kits.slots.neurons import Neurons
from testbed.kits.slots.planner import SlotDetails
from testbed.kits.slots.program import Fixed, SlotProgram, transmit_of
from testbed.method import Job
from testbed.methods.edgepipe.planner import EdgePipeOptions, arrangement


class TreatedAsNull:
    """A missing part counts as zero in the forward pass; the gradient needs all losses of the layer behind.

    What counted as zero gets no losses. The paper leaves that open; with losses for outputs that nobody had, which
    lower no loss, the layer before grows without bound (Vertical, 7,500 batches of MNIST).
    """

    announces = False
    masks = True

    def __init__(self, micro_batches: int = 1) -> None:
        """Update after each last of so many micro-batches, with the gradients of those that came."""
        self._micro_batches = micro_batches

    def inputs(self, arrived: Arrived) -> torch.Tensor:
        """Return the outputs of the layer before, (samples, values), with zeros for what is missing."""
        return arrived.together()

    tested = inputs

    async def results(self, arrived: Arrived) -> Usable:
        """Take zeros for what is missing."""
        return Usable(arrived.together(), "new")

    async def losses(self, arrived: Arrived) -> Usable:
        """Return the gradient of the own outputs, if everyone's part of it has arrived."""
        return Usable(arrived.added(), "new") if arrived.complete else Usable(None, "nothing")

    def learn(
        self, shard: LayerShard, layer: int, batch: int, gradient: torch.Tensor | None, usable: Usable
    ) -> Work | None:
        """Update with each gradient, (samples, values), as it comes; without one no layer up to this one learns."""
        last = (batch + 1) % self._micro_batches == 0
        if gradient is None and not (last and shard.gradients()):
            return None

        def work() -> torch.Tensor | None:
            before = None if gradient is None else back(shard, layer, batch, gradient)
            if last:
                shard.update()
            return before

        return work

    def observe(self, step: int, loss: float) -> None:
        """Need no loss."""


async def run(device: Device, job: Job[EdgePipeOptions, SlotDetails]) -> None:
    """Train and test, slot by slot, from the slot that it is."""
    async with Mailbox(device, job.problem.links, CASTS) as mailbox:
        neurons = Neurons(device, job.problem)
        held = Fixed(arrangement(job.problem, job.plan), neurons, device.name)
        null = TreatedAsNull(job.plan.details.micro_batches)
        await SlotProgram(mailbox, job, neurons, held, null, transmit_of(mailbox, job)).run()
