"""Rows of devices, room for layers, and shards of a planning problem. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from testbed.hardware import DeviceSpec
from testbed.plan import Piece
from testbed.wire.message import size_around
from testbed_generation import placement
from testbed_generation.placement import Layers, Row
from testbed_generation.sharding import Shard, divide_layer
from testbed_generation.workload import GenerateProblem

CHOSEN_BYTES = 64
"""Bytes of a chosen token with the fields of its message, about."""
CHOICES: dict[str, Callable[[Row], Layers]] = {
    "even": placement.even,
    "memory": placement.by_memory,
    "latency": placement.least_latency,
    "throughput": placement.least_bottleneck,
}
"""Partitions by their names in scenarios."""


def middle_position(problem: GenerateProblem[Any]) -> int:
    """Return the tokens in the cache in the middle of a text of mean length, for which times are predicted."""
    prompts = [len(request.prompt) for request in problem.requests] or [1]
    return round(sum(prompts) / len(prompts)) + problem.workload.tokens // 2


def room(problem: GenerateProblem[Any], device: DeviceSpec) -> int:
    """Return for how many layers a device has memory, beside the embedding, the output matrix and buffers.

    Only the source holds the embedding; the output matrix is reckoned on every device, since any may be the last one.
    """
    model = problem.model
    is_source = device.name == problem.devices[0].name
    draft = (
        problem.draft.whole_memory() if is_source and problem.draft is not None else 0.0
    )
    free = (
        device.memory
        - draft
        - model.buffer_memory()
        - model.end_memory(is_source, last=True)
    )
    return max(0, math.floor(free / model.layer_memory()))


def row_over(problem: GenerateProblem[Any], names: Sequence[str]) -> Row:
    """Return the inputs for choosing layers over some devices; the source is the first device."""
    model = problem.model
    devices = [problem.device(name) for name in names]
    position = middle_position(problem)

    def seconds(size: int) -> Callable[[str, str], float]:
        def between(one: str, other: str) -> float:
            link = problem.links.get((one, other))
            if link is None:
                return math.inf
            return link.transmission_time(size_around(size)) + link.delay

        return between

    return Row(
        devices=tuple(names),
        layers=model.architecture.layers,
        seconds={
            device.name: model.layer_seconds(device, position) for device in devices
        },
        capacity={device.name: room(problem, device) for device in devices},
        send=seconds(model.message_bytes(1)),
        answer=seconds(CHOSEN_BYTES),
        last_seconds={
            device.name: device.seconds(model.output(1)) for device in devices
        },
    )


def first_devices(problem: GenerateProblem[Any], spares: Collection[str]) -> list[str]:
    """Return the devices that layers are planned over: all but the spares."""
    return [device.name for device in problem.devices if device.name not in spares]


def pieces_of(problem: GenerateProblem[Any], layers: Layers) -> tuple[Piece, ...]:
    """Return the pieces of a row."""
    model, pieces, first = problem.model, [], 0
    for index, (name, count) in enumerate(layers):
        ends = model.end_memory(index == 0, index == len(layers) - 1)
        memory = count * model.layer_memory() + ends + model.buffer_memory()
        if index == 0 and problem.draft is not None:
            memory += problem.draft.whole_memory()
        parameters = count * model.architecture.layer_values
        flops = model.architecture.layer_flops(1, middle_position(problem)) * count
        piece = Piece(
            device=name,
            first=first,
            last=first + count,
            memory=memory,
            parameters=parameters,
            flops=flops,
        )
        pieces.append(piece)
        first += count
    return tuple(pieces)


def shards_of(
    problem: GenerateProblem[Any], shares: Sequence[float] | None
) -> tuple[Shard, ...]:
    """Return the shard of each device: by the shares, else in proportion to how fast each decodes a layer."""
    if shares is None:
        position = middle_position(problem)
        rates = []
        for device in problem.devices:
            seconds = problem.model.layer_seconds(device, position)
            rates.append(1 / seconds if seconds > 0 else 1.0)
        shares = rates
    return divide_layer(problem.model.architecture, shares)
