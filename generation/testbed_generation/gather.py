"""Tensor parallelism by rows, as in distributed-llama of January 2024 (revision 8b16487, src/transformer-tasks.cpp).

Every device holds some rows of every matrix of every layer; a row gives one output. The coordinator alone normalises,
attends and keeps the KV caches. For each product of a layer it sends the inputs to the other devices (the workers),
multiplies them with its own rows, and gathers the outputs of the workers' rows.
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
from testbed_generation.transformer import Cache, attend_to, normalise
from testbed_generation.transport import Transport
from testbed_generation.weights import WeightSource, layer_shapes, weight_name

PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "hidden": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a layer in the order of computation, with their matrices."""


@dataclass(frozen=True)
class Inputs(TypedMessage, kind="inputs"):
    """From the coordinator: inputs to multiply with the receiver's rows of a product."""

    forward: int
    """Number of the forward pass."""
    layer: int
    product: str
    """A key of `PRODUCTS`."""
    tokens: int = 1
    """Number of tokens."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Activations, packed for transport; for the product ``down`` without those that the worker has computed itself."""


@dataclass(frozen=True)
class Outputs(
    TypedMessage, kind="outputs", key=("sender", "forward", "layer", "product")
):
    """To the coordinator: the outputs of the sender's rows of a product."""

    forward: int
    layer: int
    product: str
    """The first three fields are those of the `Inputs`."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Activations, packed for transport."""


KINDS: tuple[type[TypedMessage], ...] = (Inputs, Outputs)
"""Messages that the mailbox of each device has to register."""


class MatrixRows:
    """A device's rows of all matrices: one of ``parts`` equal parts of each matrix."""

    def __init__(
        self,
        model: CostModel,
        part: int,
        parts: int,
        transport: Transport,
        weight_source: WeightSource | None,
    ) -> None:
        """Read part number ``part``, counted from 0, of ``parts`` equal parts.

        ``weight_source`` is None without numerics.
        """
        self.model = model
        self.parts = parts
        self.part = part
        self.transport = transport
        self._shapes = layer_shapes(model.architecture)
        self._weights: list[dict[str, Tensor]] = []
        if weight_source is None:
            return
        for layer in range(model.architecture.layers):
            weights = {}
            for names in PRODUCTS.values():
                for name in names:
                    matrix = weight_source.read(weight_name(layer, name))
                    weights[name] = matrix.chunk(parts)[part].contiguous()
            self._weights.append(weights)

    def output_widths(self, product: str) -> tuple[int, ...]:
        """Return the number of activations of a token computed by each device in a product, for each tensor."""
        # The device multiplies the outputs of gate and up with each other, which gives a single tensor.
        if product == "hidden":
            return (self.model.architecture.hidden // self.parts,)
        widths = []
        for name in PRODUCTS[product]:
            rows, _ = self._shapes[name]
            widths.append(rows // self.parts)
        return tuple(widths)

    async def multiply(
        self, mailbox: Mailbox, activations: Tensor | None, inputs: Inputs
    ) -> tuple[Tensor, ...] | None:
        """Return the outputs of the device's rows for ``activations``, (tokens, rows) for each tensor.

        ``inputs`` only names the forward pass, the layer, the product and the number of tokens; its tensors are not
        used. The result is None without numerics.
        """
        product = inputs.product

        def compute() -> tuple[Tensor, ...] | None:
            if activations is None:
                return None
            with torch.inference_mode():
                outputs = []
                for name in PRODUCTS[product]:
                    weight = self._weights[inputs.layer][name]
                    outputs.append(functional.linear(activations, weight))
                if product == "hidden":
                    # A worker has the same rows of gate and up, so it applies SwiGLU and sends half as much.
                    gate, up = outputs
                    return (functional.silu(gate) * up,)
                return tuple(outputs)

        weight_values = 0
        for name in PRODUCTS[product]:
            rows, columns = self._shapes[name]
            weight_values += rows // self.parts * columns
        cost = self.model.product_cost(
            weight_values, inputs.tokens, integers=self.transport.storage == "q8_0"
        )
        span = Span(product, batch=inputs.forward, micro=inputs.layer)
        return await mailbox.device.compute(compute, cost, span)


async def serve_products(mailbox: Mailbox, coordinator: str, rows: MatrixRows) -> None:
    """Multiply activations from the coordinator with a worker's rows, until cancelled."""
    transport = rows.transport
    local_hidden: Tensor | None = None
    """The worker's newest outputs of the product ``hidden``, (tokens, hidden rows of the worker)."""
    while True:
        inputs = await mailbox.take(Inputs)
        activations = transport.unpack(inputs.tensors, (inputs.tokens, -1))
        if inputs.product == "down":
            # In distributed-llama a worker receives only the hidden activations of other devices, as its published
            # numbers of bytes confirm.
            activations = _insert_part(activations, local_hidden, rows.part)
        products = await rows.multiply(mailbox, activations, inputs)
        # Rounded as on the wire, so that all devices multiply the same activations as the coordinator.
        if inputs.product == "hidden" and products is not None:
            local_hidden = transport.round_trip(products[0])
        tensors = {}
        padding = 0
        if products is None:
            width = sum(rows.output_widths(inputs.product))
            padding = transport.size(inputs.tokens * width)
        else:
            tensors = transport.pack(torch.cat(products, dim=1))
        outputs = Outputs(
            inputs.forward, inputs.layer, inputs.product, tensors, padding=padding
        )
        mailbox.post(coordinator, outputs)


def _insert_part(
    activations: Tensor | None, part: Tensor | None, index: int
) -> Tensor | None:
    """Return activations with part number ``index`` of their columns inserted; None without numerics."""
    if activations is None or part is None:
        return activations
    start = index * part.shape[1]
    return torch.cat((activations[:, :start], part, activations[:, start:]), dim=1)


class RowCoordinator:
    """The coordinator's part of all layers: a `testbed_generation.tensor_parallel.LocalPart`."""

    def __init__(
        self,
        mailbox: Mailbox,
        workers: Sequence[str],
        rows: MatrixRows,
        weight_source: WeightSource | None,
    ) -> None:
        """``rows`` are the coordinator's: the first part of each matrix. ``weight_source`` is None without numerics."""
        self._mailbox = mailbox
        self._workers = workers
        self._rows = rows
        self._norms: list[tuple[Tensor, Tensor]] = []
        """Scales of both normalisations of each layer; empty without numerics."""
        self._caches: dict[int, list[Cache]] = {}
        """Cache of each layer by request."""
        if weight_source is not None:
            for layer in range(rows.model.architecture.layers):
                # Workers only multiply; the coordinator normalises, attends and adds.
                attention_name = weight_name(layer, "input_layernorm")
                feed_forward_name = weight_name(layer, "post_attention_layernorm")
                attention_scale = weight_source.read(attention_name)
                feed_forward_scale = weight_source.read(feed_forward_name)
                self._norms.append((attention_scale, feed_forward_scale))

    def release_request(self, request: int) -> None:
        """Drop the caches of a request."""
        self._caches.pop(request, None)

    async def compute_layers(self, forward: Forward) -> Tensor | None:
        """Return the activations after all layers, (tokens, width); None without numerics."""
        layers = self._rows.model.architecture.layers
        new_caches = [Cache() for _ in range(layers)]
        caches = self._caches.setdefault(forward.request, new_caches)
        activations = forward.values
        for layer in range(layers):
            cache = caches[layer]
            activations = await self._attention(forward, layer, activations, cache)
            activations = await self._feed_forward(forward, layer, activations)
        self._record_transfer(forward)
        return activations

    async def _attention(
        self, forward: Forward, layer: int, activations: Tensor | None, cache: Cache
    ) -> Tensor | None:
        """Return the activations after the first half of a layer."""
        scale, _ = self._norms[layer] if self._norms else (None, None)
        inputs = self._normalise(activations, scale)
        queries, keys, values = await self._gather_product(
            forward, layer, "qkv", inputs
        )
        attended = await self._attend_all_heads(forward, queries, keys, values, cache)
        (added,) = await self._gather_product(forward, layer, "output", attended)
        if activations is None or added is None:
            return None
        return activations + added

    async def _feed_forward(
        self, forward: Forward, layer: int, activations: Tensor | None
    ) -> Tensor | None:
        """Return the activations after the second half of a layer."""
        _, scale = self._norms[layer] if self._norms else (None, None)
        inputs = self._normalise(activations, scale)
        (hidden,) = await self._gather_product(forward, layer, "hidden", inputs)
        (added,) = await self._gather_product(forward, layer, "down", hidden)
        if activations is None or added is None:
            return None
        return activations + added

    def _record_transfer(self, forward: Forward) -> None:
        """Record the bytes of all activations of a forward pass without headers, as in distributed-llama's README."""
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
            # A worker has its part of the hidden activations already.
            columns -= columns // self._rows.parts
        return self._rows.transport.size(tokens * columns)

    def _output_bytes(self, product: str, tokens: int) -> int:
        """Return the bytes of the outputs of a product from one worker."""
        width = sum(self._rows.output_widths(product))
        return self._rows.transport.size(tokens * width)

    def _normalise(
        self, activations: Tensor | None, scale: Tensor | None
    ) -> Tensor | None:
        if activations is None or scale is None:
            return None
        return normalise(activations, scale, self._rows.model.architecture.epsilon)

    async def _attend_all_heads(
        self,
        forward: Forward,
        queries: Tensor | None,
        keys: Tensor | None,
        values: Tensor | None,
        cache: Cache,
    ) -> Tensor | None:
        """Return the attention output of all heads, (tokens, width of all heads); appends to the cache."""
        model = self._rows.model

        def attend() -> Tensor | None:
            if queries is None or keys is None or values is None:
                return None
            with torch.inference_mode():
                return attend_to(model.architecture, queries, keys, values, cache)

        last_position = forward.position + forward.tokens - 1
        span = Span("attention", batch=forward.request, micro=last_position)
        cost = model.attention_cost(forward.tokens, forward.position)
        return await self._mailbox.device.compute(attend, cost, span)

    async def _gather_product(
        self, forward: Forward, layer: int, product: str, activations: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the outputs of all rows of a product, (tokens, rows) for each tensor; without numerics only None."""
        rows, transport = self._rows, self._rows.transport
        # Rounded as on the wire, so that the coordinator multiplies the same activations as the workers.
        activations = transport.round_trip(activations)
        self._send_inputs(forward, layer, product, activations)
        # The coordinator computes at the same time as the workers.
        local_inputs = Inputs(forward.number, layer, product, forward.tokens)
        local_outputs = await rows.multiply(self._mailbox, activations, local_inputs)
        widths = rows.output_widths(product)
        parts = [] if local_outputs is None else [local_outputs]
        # Rows are concatenated in the order of the devices, so outputs are received in this order.
        for name in self._workers:
            key = (name, forward.number, layer, product)
            message = await self._mailbox.take(Outputs, key)
            shape = (forward.tokens, sum(widths))
            outputs = transport.unpack(message.tensors, shape)
            if outputs is not None:
                parts.append(torch.split(outputs, list(widths), dim=1))
        if not parts:
            return (None,) * len(widths)
        return tuple(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True))

    def _send_inputs(
        self, forward: Forward, layer: int, product: str, activations: Tensor | None
    ) -> None:
        """Send the inputs of a product to all workers."""
        rows, transport = self._rows, self._rows.transport
        # Part 0 of each matrix is the coordinator's.
        for part, name in enumerate(self._workers, start=1):
            sent_activations = activations
            if product == "down" and activations is not None:
                # A worker has its part of the hidden activations already.
                chunks = list(activations.chunk(rows.parts, dim=1))
                del chunks[part]
                sent_activations = torch.cat(chunks, dim=1)
            padding = 0
            if activations is None:
                padding = self._input_bytes(product, forward.tokens)
            inputs = Inputs(
                forward=forward.number,
                layer=layer,
                product=product,
                tokens=forward.tokens,
                tensors=transport.pack(sent_activations),
                padding=padding,
            )
            self._mailbox.post(name, inputs)
