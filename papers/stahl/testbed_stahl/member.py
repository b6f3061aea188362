"""One device of a fully distributed inference (a member) in one configuration: its layer slices and its requests.

Concurrent requests share the processor and the links. The source, which has the images, is a member like the workers.
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
    """The work of one device in one configuration; a `testbed.messaging.membership.Role`."""

    def __init__(
        self,
        mailbox: Mailbox,
        problem: PlanningProblem,
        flow: Dataflow,
        coordinator: str,
        state: State | None,
    ) -> None:
        """``state`` has the member's slices of the weights; None draws these from the seed."""
        self._mailbox = mailbox
        self._problem = problem
        self._flow = flow
        self._state = state
        self._computes = problem.workload.numerics == "full"
        memory = problem.device(mailbox.device.name).memory
        self._context = MemberContext(mailbox, flow, coordinator, memory)
        self._requests: dict[int, RequestWork] = {}
        # In the order of the plan, since tiles name their devices by indices of the plan.
        speeds = [problem.device(name).speed for name in flow.plan.devices]
        self._tiles = TileWork(self._context, speeds, self._distribute_map)
        self._reported = -1
        """Peak of activations in the last report, in bytes."""

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
        # One operation for each value, as `costs.copy_cost` charges a stage without momentum.
        values = count_parameters(self._flow, self._context.index)
        cost = Cost(values)
        await self._context.compute(self._load_weights, cost, Span("load"))
        self._report_memory()
        self._register_handler(Activation, self._begin_request)
        self._register_handler(OutputPiece, self._take_values)
        self._register_handler(PartialSums, self._take_sums)
        self._register_handler(TileInput, self._take_tile)
        self._register_handler(TileOverlap, self._take_overlap)
        self._register_handler(TileOutput, self._place_tile)

    def _load_weights(self) -> None:
        """Create the slices of all layers, and count their bytes."""
        if self._computes:
            self._load_values()
        else:
            self._load_shapes()

    def _load_shapes(self) -> None:
        """Create slices without values, for timing-only runs."""
        context = self._context
        layers = self._flow.graph.layers
        for index, part in stored_slices(self._flow, context.index).items():
            context.layers[index] = SlicedShape(layers[index], part)
        values = count_parameters(self._flow, context.index)
        context.ledger.weights = BYTES_PER_VALUE * values

    def _load_values(self) -> None:
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
        """Start a request on the source by distributing the images."""
        images = message.tensor
        if not self._computes:
            # Tensors on torch's device "meta" have a shape and no values.
            images = images.to("meta")
        request = self._request_work(message.batch)
        if self._flow.plan.tiles:
            self._tiles.begin(message.batch, images)
        else:
            request.distribute(INPUT, images.flatten(1))

    def _distribute_map(self, request: int, value: torch.Tensor) -> None:
        """Distribute the complete output of the tiled layers, (samples, elements), from the source."""
        self._request_work(request).distribute(self._flow.tiled_count - 1, value)

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        try:
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
        # Creates the state of the request if this is its first message, so that its later layers begin.
        self._request_work(message.request)
        self._tiles.take_input(message.request, message.tile, message.tensor)

    def _take_overlap(self, message: TileOverlap) -> None:
        self._tiles.take_overlap(
            message.request, message.lender, message.borrower, message.tensor
        )

    def _place_tile(self, message: TileOutput) -> None:
        self._tiles.insert_tile(
            message.request, message.tile, message.tensor, message.sender
        )

    def _take_values(self, message: OutputPiece) -> None:
        maker = self._flow.plan.devices.index(message.sender)
        self._request_work(message.request).take_values(
            message.value, message.first, message.tensor, maker
        )

    def _take_sums(self, message: PartialSums) -> None:
        channels = Range(message.first, message.last)
        sender = self._flow.plan.devices.index(message.sender)
        store = self._request_work(message.request).store
        store.put_sums(message.layer, channels, sender, message.tensor)

    def _request_work(self, number: int) -> RequestWork:
        """Return the state of a request, created by the first message about the request."""
        if number not in self._requests:
            work = RequestWork(self._context, number)
            self._requests[number] = work
            self._context.start(self._answer_request(work))
        return self._requests[number]

    async def _answer_request(self, work: RequestWork) -> None:
        await work.run()
        del self._requests[work.number]
        self._report_memory()

    def _report_memory(self) -> None:
        """Record the memory of weights and activations if the peak has risen since the last report."""
        ledger = self._context.ledger
        if ledger.peak > self._reported:
            self._reported = ledger.peak
            self._mailbox.device.record(
                "memory", weights=ledger.weights, activations=ledger.peak
            )
