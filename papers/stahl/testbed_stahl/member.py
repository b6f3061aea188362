"""The work of one device (a member) of a fully distributed inference: storing slices of layers, and answering requests.

The work belongs to one configuration, the period between two assignments of work by the coordinator: a new
configuration begins with new members. Concurrent requests share the processor and the links. The source, the device
that has the images, is a member like the workers.

As in `testbed_stahl.dataflow`, a value is the image or the output of a layer, in elements of one sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from testbed.device import Cost, Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed.ml.layers.shard import State
from testbed.ml.lazy import torch
from testbed.ml.method import PlanningProblem
from testbed.ml.models.shapes import BYTES_PER_VALUE, INPUT
from testbed.ml.models.sliced import SlicedLayer, SlicedShape, draw_tensors
from testbed.ml.pipeline.messages import Activation
from testbed_stahl.dataflow import Dataflow, stored_layers, stored_slices
from testbed_stahl.demands import count_parameters
from testbed_stahl.messages import (
    OutputPiece,
    PartialSums,
    TileInput,
    TileOutput,
    TileOverlap,
)
from testbed_stahl.plan import Range
from testbed_stahl.request_work import MemberContext, RequestWork
from testbed_stahl.tile_work import TileWork

AnyMessage = TypeVar("AnyMessage", bound=TypedMessage)


class InferenceMember:
    """The work of one member in one configuration; a `testbed.messaging.membership.Role`."""

    def __init__(
        self,
        mailbox: Mailbox,
        problem: PlanningProblem,
        flow: Dataflow,
        coordinator: str,
        state: State | None,
    ) -> None:
        """``state`` has only the member's slices of the weights; None draws these from the seed."""
        self._mailbox = mailbox
        self._problem = problem
        self._flow = flow
        self._state = state
        self._has_numbers = problem.workload.numerics == "full"
        """Whether tensors have numbers, not only shapes as in timing-only runs."""
        memory = problem.device(mailbox.device.name).memory
        self._context = MemberContext(mailbox, flow, coordinator, memory)
        self._requests: dict[int, RequestWork] = {}
        """Number of each unfinished request -> this member's work for the request."""
        # In the order of the plan, since tiles name their devices by indices of the plan.
        speeds = [problem.device(name).speed for name in flow.plan.devices]
        self._tiles = TileWork(self._context, speeds, self._distribute_tiled_output)
        self._reported_peak = -1
        """Peak of activations in the last report, in bytes; -1 before the first report, which has a peak of 0."""

    @property
    def actions(self) -> int:
        """Number of computations and received messages."""
        return self._context.actions

    @property
    def computing(self) -> bool:
        """Whether the device computes right now."""
        return self._context.computing

    async def prepare(self) -> None:
        """Load the weights and start receiving messages."""
        # One operation for each weight: the same charge as `costs.copy_cost`, without the state of an optimizer.
        parameters = count_parameters(self._flow, self._context.index)
        cost = Cost(parameters)
        await self._context.compute(self._load_weights, cost, Span("load"))
        self._report_memory()
        # Only the source receives images, from the program on its own device, and computed tiles (`TileOutput`).
        self._register_handler(Activation, self._begin_request)
        self._register_handler(OutputPiece, self._take_piece)
        self._register_handler(PartialSums, self._take_sums)
        self._register_handler(TileInput, self._take_tile)
        self._register_handler(TileOverlap, self._take_overlap)
        self._register_handler(TileOutput, self._place_tile)

    def _load_weights(self) -> None:
        """Create the slices of all layers, and count the bytes of the slices."""
        if self._has_numbers:
            self._load_tensors()
        else:
            self._load_shapes()

    def _load_shapes(self) -> None:
        """Create slices without numbers, for timing-only runs."""
        context = self._context
        layers = self._flow.graph.layers
        for index, part in stored_slices(self._flow, context.index).items():
            context.layers[index] = SlicedShape(layers[index], part)
        parameters = count_parameters(self._flow, context.index)
        context.ledger.weights = BYTES_PER_VALUE * parameters

    def _load_tensors(self) -> None:
        """Create slices with the received or drawn tensors, which are cut to the member's slices already."""
        context = self._context
        layers = self._flow.graph.layers
        state = self._state
        if state is None:
            stored = stored_layers(self._flow, context.index)
            state = draw_tensors(self._problem.model, stored, self._problem.seed)
        for index, part in stored_slices(self._flow, context.index).items():
            context.layers[index] = SlicedLayer(layers[index], part, state)
        weight_bytes = sum(tensor.nbytes for tensor in state.values())
        context.ledger.weights = weight_bytes

    def _begin_request(self, message: Activation) -> None:
        """Start a request on the source by distributing the images, (samples, channels, height, width)."""
        images = message.tensor
        if not self._has_numbers:
            # Tensors on torch's device "meta" have a shape and no numbers.
            images = images.to("meta")
        # In messages of an inference, the number of the batch is the number of the request.
        number = message.batch
        # Begun also if tiles come first: the layers after the tiles then wait for the output of the tiles.
        work = self._work_for(number)
        if self._flow.plan.tiles:
            self._tiles.begin(number, images)
        else:
            work.distribute(INPUT, images.flatten(1))

    def _distribute_tiled_output(self, number: int, output: torch.Tensor) -> None:
        """Distribute the complete output of the last tiled layer, (samples, elements), from the source."""
        last_tiled_layer = self._flow.tiled_count - 1
        self._work_for(number).distribute(last_tiled_layer, output)

    async def serve(self) -> None:
        """Stay until cancelled, while the handlers of `prepare` answer requests; then cancel all tasks."""
        try:
            # Nothing completes this future: only a cancellation ends the wait.
            await asyncio.get_running_loop().create_future()
        finally:
            self._context.cancel()

    def _register_handler(
        self, kind: type[AnyMessage], handler: Callable[[AnyMessage], None]
    ) -> None:
        def handle(message: AnyMessage) -> None:
            # A message counts as progress, too: the supervisor polls devices after a time without progress.
            self._context.actions += 1
            handler(message)

        self._mailbox.on(kind, handle)

    def _take_tile(self, message: TileInput) -> None:
        # May be the first message of a request, whose layers after the tiles then begin to wait for input. The other
        # messages about tiles need not begin them: an overlap joins a `TileInput` of the same tile, and computed tiles
        # arrive at the source, where the images have begun the request.
        self._work_for(message.request)
        self._tiles.take_input(message.request, message.tile, message.tensor)

    def _take_overlap(self, message: TileOverlap) -> None:
        # The tile ``borrower`` reuses regions that were computed for the tile ``lender``.
        self._tiles.take_overlap(
            message.request, message.lender, message.borrower, message.tensor
        )

    def _place_tile(self, message: TileOutput) -> None:
        self._tiles.insert_tile(
            message.request, message.tile, message.tensor, message.sender
        )

    def _take_piece(self, message: OutputPiece) -> None:
        # On the source, which alone uses the sender, the sender has made the piece.
        sender = self._flow.plan.devices.index(message.sender)
        self._work_for(message.request).take_values(
            message.value, message.first, message.tensor, sender
        )

    def _take_sums(self, message: PartialSums) -> None:
        # ``last`` is exclusive in messages and ranges.
        channels = Range(message.first, message.last)
        sender = self._flow.plan.devices.index(message.sender)
        store = self._work_for(message.request).store
        store.put_sums(message.layer, channels, sender, message.tensor)

    def _work_for(self, number: int) -> RequestWork:
        """Return this member's work for a request; the first message about the request starts the work."""
        if number not in self._requests:
            work = RequestWork(self._context, number)
            self._requests[number] = work
            self._context.start(self._run_work(work))
        return self._requests[number]

    async def _run_work(self, work: RequestWork) -> None:
        """Do this member's part of a request; on the source, the part ends with the answer."""
        await work.run()
        # All messages for the member's layers have arrived. Only a member without layers after the tiles may get
        # another tile of the request, and then begins and ends this work again.
        del self._requests[work.number]
        self._report_memory()

    def _report_memory(self) -> None:
        """Record the memory of weights and activations if the peak has risen since the last report."""
        # The ledger counts the bytes of stored tensors (`testbed_stahl.request_work.Ledger`).
        ledger = self._context.ledger
        if ledger.peak > self._reported_peak:
            self._reported_peak = ledger.peak
            self._mailbox.device.record(
                "memory", weights=ledger.weights, activations=ledger.peak
            )
