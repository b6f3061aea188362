"""One device of a fully distributed inference in one configuration: its layer slices and its requests.

Concurrent requests share the processor and the links.
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
from testbed_stahl.dataflow import Dataflow, layers_stored, stored
from testbed_stahl.demands import parameters
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

K = TypeVar("K", bound=TypedMessage)


class InferenceMember:
    """A `testbed.messaging.membership.Role` bound to one configuration."""

    def __init__(
        self,
        mailbox: Mailbox,
        problem: PlanningProblem,
        flow: Dataflow,
        coordinator: str,
        state: State | None,
    ) -> None:
        """``state`` is the member's slices of the weights; None draws them from the seed."""
        self._mailbox = mailbox
        self._problem = problem
        self._flow = flow
        self._state = state
        self._computes = problem.workload.numerics == "full"
        self._context = MemberContext(
            mailbox, flow, coordinator, problem.device(mailbox.device.name).memory
        )
        self._requests: dict[int, RequestWork] = {}
        speeds = [problem.device(name).speed for name in flow.plan.devices]
        self._tiles = TileWork(
            self._context,
            speeds,
            lambda request, value: self._request_work(request).spread(
                flow.tiled - 1, value
            ),
        )
        self._reported = -1

    @property
    def actions(self) -> int:
        """Number of computations done."""
        return self._context.actions

    @property
    def computing(self) -> bool:
        """Whether the device computes right now."""
        return self._context.computing

    async def prepare(self) -> None:
        """Load the weights and start receiving messages."""
        context, flow, problem = self._context, self._flow, self._problem

        def load() -> None:
            held = layers_stored(flow, context.index)
            if not self._computes:
                for layer, part in stored(flow, context.index).items():
                    context.layers[layer] = SlicedShape(flow.graph.layers[layer], part)
                context.ledger.weights = BYTES_PER_VALUE * parameters(
                    flow, context.index
                )
                return
            state = (
                draw_tensors(problem.model, held, problem.seed)
                if self._state is None
                else self._state
            )
            for layer, part in stored(flow, context.index).items():
                context.layers[layer] = SlicedLayer(
                    flow.graph.layers[layer], part, state
                )
            context.ledger.weights = sum(tensor.nbytes for tensor in state.values())

        # One operation for each value, as `costs.copy_cost` has it for a stage without momentum.
        await context.compute(load, Cost(parameters(flow, context.index)), Span("load"))
        self._report_memory()
        self._register_handler(
            Activation,
            lambda message: self._begin_request(
                message.batch, self._input_image(message.tensor)
            ),
        )
        self._register_handler(OutputPiece, self._take_values)
        self._register_handler(PartialSums, self._take_sums)
        tiles = self._tiles
        self._register_handler(TileInput, self._take_tile)
        self._register_handler(
            TileOverlap,
            lambda lent: tiles.take_overlap(
                lent.request, lent.lender, lent.borrower, lent.tensor
            ),
        )
        self._register_handler(
            TileOutput,
            lambda made: tiles.place(made.request, made.tile, made.tensor, made.sender),
        )

    def _begin_request(self, number: int, images: torch.Tensor) -> None:
        """Start a request on the source by distributing its images."""
        request = self._request_work(number)
        if self._flow.plan.tiles:
            self._tiles.begin(number, images)
        else:
            request.spread(INPUT, images.flatten(1))

    def _input_image(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the image of a request, or a tensor without values in timing-only runs."""
        return tensor if self._computes else tensor.to("meta")

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._context.cancel()

    def _register_handler(self, kind: type[K], handler: Callable[[K], None]) -> None:
        def handle(message: K) -> None:
            self._context.actions += 1
            handler(message)

        self._mailbox.on(kind, handle)

    def _take_tile(self, message: TileInput) -> None:
        self._request_work(message.request)
        self._tiles.take_input(message.request, message.tile, message.tensor)

    def _take_values(self, message: OutputPiece) -> None:
        maker = self._flow.plan.devices.index(message.sender)
        self._request_work(message.request).take_values(
            message.value, message.first, message.tensor, maker
        )

    def _take_sums(self, message: PartialSums) -> None:
        channels, sender = (
            Range(message.first, message.last),
            self._flow.plan.devices.index(message.sender),
        )
        self._request_work(message.request).store.put_sums(
            message.layer, channels, sender, message.tensor
        )

    def _request_work(self, number: int) -> RequestWork:
        """Return the state of a request, created by the first message about the request."""
        if number not in self._requests:
            self._requests[number] = RequestWork(self._context, number)
            self._context.start(self._answer_request(self._requests[number]))
        return self._requests[number]

    async def _answer_request(self, work: RequestWork) -> None:
        await work.run()
        del self._requests[work.number]
        self._report_memory()

    def _report_memory(self) -> None:
        ledger = self._context.ledger
        if ledger.peak > self._reported:
            self._reported = ledger.peak
            self._mailbox.device.record(
                "memory", weights=ledger.weights, activations=ledger.peak
            )
