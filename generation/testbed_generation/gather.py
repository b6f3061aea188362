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
    """From the source: inputs to multiply with the receiver's rows of a product."""

    forward: int
    """Number of the forward pass."""
    layer: int
    product: str
    """A key of `PRODUCTS`."""
    tokens: int = 1
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of all inputs, packed for transport; of the product ``down`` without those that the worker made itself."""


@dataclass(frozen=True)
class Outputs(
    TypedMessage, kind="outputs", key=("sender", "forward", "layer", "product")
):
    """To the source: the sender's rows of a product."""

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
        """Hold part number ``part``, from 0, of ``parts`` equal parts.

        ``source`` has the weights; None without numerics.
        """
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
                    whole = source.read(full_name(layer, name))
                    own[name] = whole.chunk(parts)[part].contiguous()
            self._weights.append(own)

    def output_widths(self, product: str) -> tuple[int, ...]:
        """Return the number of values of a token that each device computes in a product, for each tensor."""
        # Gate and up are multiplied with each other on the device, so one tensor remains of two.
        if product == "hidden":
            return (self.model.architecture.hidden // self.parts,)
        return tuple(self._shapes[name][0] // self.parts for name in PRODUCTS[product])

    async def multiply(
        self, mailbox: Mailbox, product: str, values: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, ...] | None:
        """Return the device's rows of a product, (tokens, rows) for each tensor; None without numerics."""

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
    transport = rows.transport
    own: Tensor | None = None
    """The worker's last hidden values, (tokens, own hidden rows)."""
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
        tensors = {}
        padding = 0
        if made is None:
            width = sum(rows.output_widths(inputs.product))
            padding = transport.size(inputs.tokens * width)
        else:
            tensors = transport.pack(torch.cat(made, dim=1))
        outputs = Outputs(
            inputs.forward, inputs.layer, inputs.product, tensors, padding=padding
        )
        mailbox.post(source, outputs)


class GatherSource:
    """The source's part of all layers, with the interface of `testbed_generation.tensor_parallel.Computing`."""

    def __init__(
        self,
        mailbox: Mailbox,
        workers: Sequence[str],
        rows: Rows,
        source: Source | None,
    ) -> None:
        """``rows`` are the source's own, the first part of each matrix.

        ``source`` has the weights; None without numerics.
        """
        self._mailbox = mailbox
        self._workers = workers
        self._rows = rows
        self._norms: list[tuple[Tensor, Tensor]] = []
        self._caches: dict[int, list[Cache]] = {}
        if source is not None:
            for layer in range(rows.model.architecture.layers):
                # Workers multiply alone: the source normalises, attends and adds.
                first = source.read(full_name(layer, "input_layernorm"))
                second = source.read(full_name(layer, "post_attention_layernorm"))
                self._norms.append((first, second))

    def release_request(self, request: int) -> None:
        """Forget the caches of a request."""
        self._caches.pop(request, None)

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the values of tokens after all layers, (tokens, width); None without numerics."""
        layers = self._rows.model.architecture.layers
        empty = [Cache() for _ in range(layers)]
        caches = self._caches.setdefault(forward.request, empty)
        values = forward.values
        for layer in range(layers):
            values = await self._attention(forward, layer, values, caches[layer])
            values = await self._feed_forward(forward, layer, values)
        self._record_transfer(forward)
        return values

    async def _attention(
        self, forward: Forward, layer: int, values: Tensor | None, cache: Cache
    ) -> Tensor | None:
        """Return the values after the first half of a layer."""
        norm, _ = self._norms[layer] if self._norms else (None, None)
        inputs = self._normalise_values(values, norm)
        queries, keys, own = await self._gather_product(forward, layer, "qkv", inputs)
        attended = await self._attend_all_heads(forward, queries, keys, own, cache)
        (added,) = await self._gather_product(forward, layer, "output", attended)
        return None if values is None or added is None else values + added

    async def _feed_forward(
        self, forward: Forward, layer: int, values: Tensor | None
    ) -> Tensor | None:
        """Return the values after the second half of a layer."""
        _, norm = self._norms[layer] if self._norms else (None, None)
        inputs = self._normalise_values(values, norm)
        (hidden,) = await self._gather_product(forward, layer, "hidden", inputs)
        (added,) = await self._gather_product(forward, layer, "down", hidden)
        return None if values is None or added is None else values + added

    def _record_transfer(self, forward: Forward) -> None:
        """Record the bytes of all values of a forward, without headers, as distributed-llama's README has them."""
        sent = received = 0
        for product in PRODUCTS:
            sent += self._input_bytes(product, forward.tokens)
            received += self._output_bytes(product, forward.tokens)
        transfers = self._rows.model.architecture.layers * len(self._workers)
        self._mailbox.device.record(
            "transfer",
            request=forward.request,
            sent=transfers * sent,
            received=transfers * received,
        )

    def _input_bytes(self, product: str, tokens: int) -> int:
        """Return the bytes of the inputs of a product for one worker."""
        # All matrices of a product have the same inputs.
        first_matrix, *_ = PRODUCTS[product]
        _, columns = layer_shapes(self._rows.model.architecture)[first_matrix]
        if product == "down":
            # A worker has its own part of the hidden values already.
            columns -= columns // self._rows.parts
        return self._rows.transport.size(tokens * columns)

    def _output_bytes(self, product: str, tokens: int) -> int:
        """Return the bytes of the outputs of a product from one worker."""
        width = sum(self._rows.output_widths(product))
        return self._rows.transport.size(tokens * width)

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
        """Return the weighted values of all heads, (tokens, values of all heads); ``own`` are the tokens' values."""
        model = self._rows.model

        def work() -> Tensor | None:
            if queries is None or keys is None or own is None:
                return None
            with torch.inference_mode():
                return attend_to(model.architecture, queries, keys, own, cache)

        last_position = forward.position + forward.tokens - 1
        span = Span("attention", batch=forward.request, micro=last_position)
        cost = model.attention_cost(forward.tokens, forward.position)
        return await self._mailbox.device.compute(work, cost, span)

    async def _gather_product(
        self, forward: Forward, layer: int, product: str, values: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return all rows of a product, (tokens, rows) for each tensor; None for each without numerics."""
        rows, transport = self._rows, self._rows.transport
        # Rounded as on the wire, so that the source multiplies the same values as the workers.
        values = transport.rounded(values)
        for part, name in enumerate(self._workers, start=1):
            sent = values
            if product == "down" and values is not None:
                # A worker has its own part of the hidden values already.
                chunks = list(values.chunk(rows.parts, dim=1))
                sent = torch.cat(chunks[:part] + chunks[part + 1 :], dim=1)
            padding = 0
            if values is None:
                padding = self._input_bytes(product, forward.tokens)
            inputs = Inputs(
                forward.number,
                layer,
                product,
                forward.tokens,
                transport.pack(sent),
                padding=padding,
            )
            self._mailbox.post(name, inputs)
        # The source computes while the workers do.
        task = Inputs(forward.number, layer, product, forward.tokens)
        own = await rows.multiply(self._mailbox, product, values, task)
        widths = rows.output_widths(product)
        parts = [] if own is None else [own]
        # In the order of the devices, not of arrival: rows are concatenated in this order.
        for name in self._workers:
            key = (name, forward.number, layer, product)
            outputs = await self._mailbox.take(Outputs, key)
            made = transport.unpack(outputs.tensors, (forward.tokens, sum(widths)))
            if made is not None:
                parts.append(torch.split(made, list(widths), dim=1))
        if not parts:
            return (None,) * len(widths)
        return tuple(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))
