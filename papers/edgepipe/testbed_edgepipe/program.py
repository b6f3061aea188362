"""EdgePipe's program, and its one rule (Section V-B): what has not arrived "is treated as null"."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from testbed.device import Device
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed import Typed
from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.method import Job
from testbed.ml.slots.arrangement import NeuronAssignment
from testbed.ml.slots.missing import Arrived, Usable, Work, backpropagate
from testbed.ml.slots.neurons import Neurons
from testbed.ml.slots.planner import SlotDetails
from testbed.ml.slots.program import KINDS, FixedAssignment, SlotProgram, transmit_of
from testbed.ml.slots.weights import Needs, receive_initial_weights, request_data
from testbed_edgepipe.planner import INFORMING, EdgePipeOptions, Learns, arrangement


class NeedsArrangement(Needs, kind=INFORMING[0]):
    """To the device that coordinates."""


@dataclass(frozen=True)
class Arranged(Typed, kind=INFORMING[1]):
    """From the device that coordinates: the task that each device receives in line 22 of Algorithm 1."""

    layers: list[dict[str, list[int]]]
    """By layer, each device's first neuron, and the one behind its last."""


class TreatedAsNull:
    """A missing part counts as zero in the forward pass; a hidden layer learns of the losses of all behind it.

    What counted as zero gets no losses, unless ``masks`` is false.
    """

    announces = False

    def __init__(
        self,
        learns: Learns = "what_arrived",
        micro_batches: int = 1,
        *,
        masks: bool = True,
    ) -> None:
        """Update after each last of so many micro-batches, with the gradients of those that came."""
        self.masks = masks
        self._learns = learns
        self._micro_batches = micro_batches
        self._incomplete: set[tuple[int, int]] = set()
        """Layers and numbers of batches of which this device lacked inputs, where it then learns nothing of them."""

    def inputs(self, arrived: Arrived) -> torch.Tensor:
        """Return the outputs of the layer before, (samples, values), with zeros for missing values."""
        if self._learns == "with_all_transmissions" and not arrived.complete:
            self._incomplete.add((arrived.layer + 1, arrived.batch))
        return arrived.joined_values()

    def test_values(self, arrived: Arrived) -> Arrived:
        """Take zeros in tests, too."""
        return arrived

    async def usable_results(self, arrived: Arrived) -> Usable:
        """Use zeros for missing values if the output layer learns from such results."""
        enough = arrived.complete or self._learns == "what_arrived"
        return self._usable(
            arrived.layer, arrived, arrived.joined_values() if enough else None
        )

    async def usable_losses(self, arrived: Arrived) -> Usable:
        """Return the gradient of the own outputs, if everyone's part of it has arrived."""
        return self._usable(
            arrived.layer - 1,
            arrived,
            arrived.summed_losses() if arrived.complete else None,
        )

    def _usable(
        self, layer: int, arrived: Arrived, values: torch.Tensor | None
    ) -> Usable:
        """Leave out a batch of which inputs of the layer were missing; forget those before it, which are over."""
        incomplete = (layer, arrived.batch) in self._incomplete
        self._incomplete -= {
            each
            for each in self._incomplete
            if each[0] == layer and each[1] <= arrived.batch
        }
        return (
            Usable(None, "nothing")
            if incomplete or values is None
            else Usable(values, "new")
        )

    def learn(
        self,
        shard: LayerShard,
        layer: int,
        batch: int,
        gradient: torch.Tensor | None,
        usable: Usable,
    ) -> Work | None:
        """Update with each gradient, (samples, values), as it comes; without one no layer up to this one learns."""
        last = (batch + 1) % self._micro_batches == 0
        if gradient is None and not (last and shard.gradients()):
            return None

        def work() -> torch.Tensor | None:
            before = (
                None
                if gradient is None
                else backpropagate(shard, layer, batch, gradient)
            )
            if last:
                shard.update()
            return before

        return work

    def observe_loss(self, step: int, loss: float) -> None:
        """Need no loss."""


async def informed(
    mailbox: Mailbox, job: Job[EdgePipeOptions, SlotDetails]
) -> NeuronAssignment:
    """Return the placement: as planned on the coordinator, and as received from the coordinator elsewhere."""
    planned = arrangement(job.problem, job.plan)
    if not job.problem.options.informs:
        return planned

    def task() -> Arranged:
        return Arranged(
            [
                {name: [held[0], held[-1] + 1] for name, held in layer.items()}
                for layer in planned.layers
            ]
        )

    received = await request_data(
        mailbox, job.plan.details.coordinator, NeedsArrangement, Arranged, task
    )
    layers = tuple(
        {name: range(*ends) for name, ends in layer.items()}
        for layer in received.layers
    )
    return replace(planned, layers=layers)


async def run(device: Device, job: Job[EdgePipeOptions, SlotDetails]) -> None:
    """Train and test, slot by slot, from the slot that it is."""
    async with Mailbox(
        device, job.problem.links, (*KINDS, NeedsArrangement, Arranged)
    ) as mailbox:
        arranged = await informed(mailbox, job)
        neurons = Neurons(
            device, job.problem, await receive_initial_weights(mailbox, job)
        )
        held = FixedAssignment(arranged, neurons, device.name)
        options = job.problem.options
        null = TreatedAsNull(
            options.learns, job.plan.details.micro_batches, masks=options.masks
        )
        await SlotProgram(
            mailbox, job, neurons, held, null, transmit_of(mailbox, job)
        ).run()
