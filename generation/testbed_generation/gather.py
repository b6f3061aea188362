"""Tensor parallelism by rows, as in distributed-llama of January 2024 (revision 8b16487, src/transformer-tasks.cpp).

Every device holds some rows of every matrix of every layer. The source alone normalises, attends and keeps the KV
caches. For each product of a layer it sends the inputs to all workers, multiplies with its own rows, and gathers the
rows of the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from testbed.device import Span
from testbed.messaging.mailbox import Mailbox
from testbed.messaging.typed_messages import TypedMessage
from testbed_generation.costs import CostModel
from testbed_generation.messages import Forward
from testbed_generation.network import Cache, attend_to, normalise
from testbed_generation.transport import Transport
from testbed_generation.weights import Source, full_name, layer_shapes

PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "hidden": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a layer in their order, with their matrices."""


@dataclass(frozen=True)
class Inputs(TypedMessage, kind="inputs"):
    """From the source: multiply with your rows of a product."""

    forward: int
    layer: int
    product: str
    tokens: int = 1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of all inputs, packed for transport; of the product ``down`` without those that the worker made itself."""


@dataclass(frozen=True)
class Outputs(
    TypedMessage, kind="outputs", key=("sender", "forward", "layer", "product")
):
    """To the source: the rows of a product."""

    forward: int
    layer: int
    product: str
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


KINDS: tuple[type[TypedMessage], ...] = (Inputs, Outputs)


class Rows:
    """A device's rows of all matrices."""

    def __init__(
        self,
        model: CostModel,
        part: int,
        parts: int,
        transport: Transport,
        source: Source | None,
    ) -> None:
        """Hold ``part`` of ``parts``; without a source only time passes."""
        self.model = model
        self.parts = parts
        self.part = part
        self.transport = transport
        self._shapes = layer_shapes(model.architecture)
        self._weights: list[dict[str, Tensor]] = []
        if source is None:
            return
        for layer in range(model.architecture.layers):
            own = {}
            for names in PRODUCTS.values():
                for name in names:
                    own[name] = (
                        source.read(full_name(layer, name))
                        .chunk(parts)[part]
                        .contiguous()
                    )
            self._weights.append(own)

    def output_widths(self, product: str) -> tuple[int, ...]:
        """Return how many values of a token each device makes in a product, by tensor."""
        if product == "hidden":
            return (self.model.architecture.hidden // self.parts,)
        return tuple(self._shapes[name][0] // self.parts for name in PRODUCTS[product])

    async def multiply(
        self, mailbox: Mailbox, product: str, values: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, ...] | None:
        """Return the device's rows of a product; None without numerics."""

        def work() -> tuple[Tensor, ...] | None:
            if values is None:
                return None
            with torch.inference_mode():
                made = []
                for name in PRODUCTS[product]:
                    weight = self._weights[inputs.layer][name]
                    made.append(functional.linear(values, weight))
                if product == "hidden":
                    # Gate and up are of the same rows, so the worker applies SwiGLU and sends half as much.
                    gate, up = made
                    return (functional.silu(gate) * up,)
                return tuple(made)

        size = 0
        for name in PRODUCTS[product]:
            rows, columns = self._shapes[name]
            size += rows // self.parts * columns
        cost = self.model.product_cost(
            size, inputs.tokens, integers=self.transport.storage == "q8_0"
        )
        span = Span(product, batch=inputs.forward, micro=inputs.layer)
        return await mailbox.device.compute(work, cost, span)


async def serve_rows(mailbox: Mailbox, source: str, rows: Rows) -> None:
    """Multiply the source's values with the worker's rows, until cancelled."""
    transport, own = rows.transport, None
    while True:
        inputs = await mailbox.take(Inputs)
        values = transport.unpack(inputs.tensors, (inputs.tokens, -1))
        # The source does not send a worker what the worker made itself; the published bytes confirm it.
        if inputs.product == "down" and values is not None and own is not None:
            place = rows.part * own.shape[1]
            values = torch.cat((values[:, :place], own, values[:, place:]), dim=1)
        made = await rows.multiply(mailbox, inputs.product, values, inputs)
        # Rounded as on the wire: all devices multiply the values that the source has.
        if inputs.product == "hidden" and made is not None:
            own = transport.rounded(made[0])
        tensors = {} if made is None else transport.pack(torch.cat(made, dim=1))
        padding = (
            transport.size(inputs.tokens * sum(rows.output_widths(inputs.product)))
            if made is None
            else 0
        )
        mailbox.post(
            source,
            Outputs(
                inputs.forward, inputs.layer, inputs.product, tensors, padding=padding
            ),
        )


class GatherSource:
    """The source's part of all layers, with the interface of `testbed_generation.tensor_parallel.Computing`."""

    def __init__(
        self,
        mailbox: Mailbox,
        workers: Sequence[str],
        rows: Rows,
        source: Source | None,
    ) -> None:
        """``rows`` are the source's own; the first."""
        self._mailbox = mailbox
        self._workers = workers
        self._rows = rows
        self._norms: list[tuple[Tensor, Tensor]] = []
        self._caches: dict[int, list[Cache]] = {}
        if source is not None:
            for layer in range(rows.model.architecture.layers):
                # Workers multiply alone: the source normalises, attends and adds.
                names = ("input_layernorm", "post_attention_layernorm")
                first, second = (source.read(full_name(layer, name)) for name in names)
                self._norms.append((first, second))

    def release_request(self, request: int) -> None:
        """Forget the caches of a request."""
        self._caches.pop(request, None)

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the values of tokens after all layers."""
        architecture = self._rows.model.architecture
        caches = self._caches.setdefault(
            forward.request, [Cache() for _ in range(architecture.layers)]
        )
        values = forward.values
        sent = received = 0
        for layer in range(architecture.layers):
            first, second = self._norms[layer] if self._norms else (None, None)
            queries, keys, own = await self._gather_product(
                forward, layer, "qkv", self._normalise_values(values, first)
            )
            attended = await self._attend_all_heads(
                forward, queries, keys, own, caches[layer]
            )
            (added,) = await self._gather_product(forward, layer, "output", attended)
            values = None if values is None or added is None else values + added
            (hidden,) = await self._gather_product(
                forward, layer, "hidden", self._normalise_values(values, second)
            )
            (added,) = await self._gather_product(forward, layer, "down", hidden)
            values = None if values is None or added is None else values + added
            for product in PRODUCTS:
                sent += len(self._workers) * self._input_bytes(product, forward.tokens)
                received += len(self._workers) * self._output_bytes(
                    product, forward.tokens
                )
        self._mailbox.device.record(
            "transfer", request=forward.request, sent=sent, received=received
        )
        return values

    def _input_bytes(self, product: str, tokens: int) -> int:
        """Return the bytes of the inputs of a product for one worker."""
        _, columns = layer_shapes(self._rows.model.architecture)[PRODUCTS[product][0]]
        if product == "down":
            columns -= columns // self._rows.parts
        return self._rows.transport.size(tokens * columns)

    def _output_bytes(self, product: str, tokens: int) -> int:
        return self._rows.transport.size(
            tokens * sum(self._rows.output_widths(product))
        )

    def _normalise_values(
        self, values: Tensor | None, scale: Tensor | None
    ) -> Tensor | None:
        if values is None or scale is None:
            return None
        return normalise(values, scale, self._rows.model.architecture.epsilon)

    async def _attend_all_heads(
        self,
        forward: Forward,
        queries: Tensor | None,
        keys: Tensor | None,
        own: Tensor | None,
        cache: Cache,
    ) -> Tensor | None:
        """Return the weighted values of all heads."""
        model = self._rows.model

        def work() -> Tensor | None:
            if queries is None or keys is None or own is None:
                return None
            with torch.inference_mode():
                return attend_to(model.architecture, queries, keys, own, cache)

        span = Span(
            "attention",
            batch=forward.request,
            micro=forward.position + forward.tokens - 1,
        )
        return await self._mailbox.device.compute(
            work, model.attention_cost(forward.tokens, forward.position), span
        )

    async def _gather_product(
        self, forward: Forward, layer: int, product: str, values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return all rows of a product, by tensor."""
        rows, transport = self._rows, self._rows.transport
        values = transport.rounded(values)
        for part, name in enumerate(self._workers, start=1):
            sent = values
            if product == "down" and values is not None:
                # A worker has its own part of the hidden values already.
                chunks = list(values.chunk(rows.parts, dim=1))
                sent = torch.cat(chunks[:part] + chunks[part + 1 :], dim=1)
            padding = (
                self._input_bytes(product, forward.tokens) if values is None else 0
            )
            inputs = Inputs(
                forward.number,
                layer,
                product,
                forward.tokens,
                transport.pack(sent),
                padding=padding,
            )
            self._mailbox.post(name, inputs)
        own = await rows.multiply(
            self._mailbox,
            product,
            values,
            Inputs(forward.number, layer, product, forward.tokens),
        )
        widths = rows.output_widths(product)
        parts = [] if own is None else [own]
        for name in self._workers:
            outputs = await self._mailbox.take(
                Outputs, (name, forward.number, layer, product)
            )
            made = transport.unpack(outputs.tensors, (forward.tokens, sum(widths)))
            if made is not None:
                parts.append(torch.split(made, list(widths), dim=1))
        if not parts:
            return (None,) * len(widths)
        return tuple(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
