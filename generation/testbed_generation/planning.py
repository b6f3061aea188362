"""Inputs of the planners from a planning problem, and assignments from their results. Pure functions without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from testbed.device import Cost
from testbed.hardware import DeviceSpec
from testbed.plan import Assignment
from testbed.wire.message import size_around
from testbed_generation import placement
from testbed_generation.placement import Layers, Row
from testbed_generation.ring import Member, Ring
from testbed_generation.sharding import Shard, divide_layer
from testbed_generation.workload import GenerateProblem

CHOSEN_BYTES = 64
"""Approximate bytes of a chosen token with the fields of its message."""
CHOICES: dict[str, Callable[[Row], Layers]] = {
    "even": placement.even,
    "memory": placement.by_memory,
    "latency": placement.least_latency,
    "throughput": placement.least_bottleneck,
}
"""Partitions by their names in scenarios."""


def middle_position(problem: GenerateProblem[Any]) -> int:
    """Return the tokens in the cache in the middle of a text of mean length, for which times are predicted."""
    return mean_prompt(problem) + problem.workload.tokens // 2


def mean_prompt(problem: GenerateProblem[Any]) -> int:
    """Return the mean length of the prompts in tokens, rounded."""
    prompts = [len(request.prompt) for request in problem.requests] or [1]
    return round(sum(prompts) / len(prompts))


def pass_seconds(
    problem: GenerateProblem[Any],
    device: DeviceSpec,
    cost: Callable[[int, int], Cost],
    *,
    is_last: bool,
) -> dict[str, float]:
    """Return a device's seconds of computing for a prompt of mean length, and for one token in the middle of a text.

    ``cost`` is a function of the number of tokens and of the tokens in the cache before them. The last device also
    chooses a token. Reads from a disk are not included.
    """
    end = problem.model.output_cost(1) if is_last else Cost()
    prompt = mean_prompt(problem)
    return {
        f"prefill of {prompt}": device.seconds(cost(prompt, 0) + end),
        "token": device.seconds(cost(1, middle_position(problem)) + end),
    }


def layer_capacity(problem: GenerateProblem[Any], device: DeviceSpec) -> int:
    """Return the number of layers for which a device has memory, beside embedding, output matrix and buffers.

    Only the source holds the embedding. The output matrix is counted on every device, since any may be the last one.
    """
    free = free_memory(problem, device, holds_output=True)
    return max(0, math.floor(free / problem.model.layer_memory()))


def free_memory(
    problem: GenerateProblem[Any], device: DeviceSpec, *, holds_output: bool
) -> float:
    """Return a device's bytes for layers, beside buffers and, on the source, embedding and draft model."""
    model = problem.model
    is_source = device.name == problem.devices[0].name
    free = device.memory - model.buffer_memory()
    free -= model.end_memory(first=is_source, last=holds_output)
    if is_source and problem.draft is not None:
        free -= problem.draft.whole_memory()
    return free


def travel_seconds(
    problem: GenerateProblem[Any], size: int
) -> Callable[[str, str], float]:
    """Return a function of two devices: the seconds of sending ``size`` bytes; infinite without a link."""

    def seconds(one: str, other: str) -> float:
        link = problem.links.get((one, other))
        if link is None:
            return math.inf
        # Rates are those of Ethernet frames, so headers count.
        return link.transmission_time(size_around(size)) + link.delay

    return seconds


def row_over(problem: GenerateProblem[Any], names: Sequence[str]) -> Row:
    """Return the inputs for choosing layers over some devices; the source is the first device."""
    model = problem.model
    # Reading the cache takes longer the longer the text is; the middle of the text gives the mean.
    position = middle_position(problem)
    seconds = {}
    capacity = {}
    last_seconds = {}
    for name in names:
        device = problem.device(name)
        seconds[name] = model.layer_seconds(device, position)
        capacity[name] = layer_capacity(problem, device)
        last_seconds[name] = device.seconds(model.output_cost(1))
    return Row(
        devices=tuple(names),
        layers=model.architecture.layers,
        seconds=seconds,
        capacity=capacity,
        send=travel_seconds(problem, model.message_bytes(1)),
        # The last device chooses the token, and sends its number instead of values.
        answer=travel_seconds(problem, CHOSEN_BYTES),
        last_seconds=last_seconds,
    )


def ring_over(
    problem: GenerateProblem[Any],
    names: Sequence[str],
    disks: Mapping[str, float],
    *,
    prefetch: bool,
) -> Ring:
    """Return the inputs for dividing layers round a ring; the head is the first device, and has the output matrix."""
    model = problem.model
    position = middle_position(problem)
    members = []
    for name in names:
        device = problem.device(name)
        is_head = device.name == problem.devices[0].name
        member = Member(
            name,
            model.layer_seconds(device, position),
            free_memory(problem, device, holds_output=is_head),
            disks.get(name),
        )
        members.append(member)
    return Ring(
        tuple(members),
        model.architecture.layers,
        model.layer_memory(),
        travel_seconds(problem, model.message_bytes(1)),
        problem.device(names[0]).seconds(model.output_cost(1)),
        prefetch,
    )


def first_devices(problem: GenerateProblem[Any], spares: Collection[str]) -> list[str]:
    """Return the names of all devices but the spares, in the order of the scenario, the source first."""
    return [device.name for device in problem.devices if device.name not in spares]


def row_assignments(
    problem: GenerateProblem[Any], layers: Layers
) -> tuple[Assignment, ...]:
    """Return the assignments of a row."""
    model, assignments, first = problem.model, [], 0
    for index, (name, count) in enumerate(layers):
        is_first, is_last = index == 0, index == len(layers) - 1
        ends = model.end_memory(first=is_first, last=is_last)
        memory = count * model.layer_memory() + ends + model.buffer_memory()
        # The first stage is the source, which proposes the drafts.
        if is_first and problem.draft is not None:
            memory += problem.draft.whole_memory()
        parameters = count * model.architecture.layer_values
        flops = model.architecture.layer_flops(1, middle_position(problem)) * count
        cost = partial(model.layers_cost, count)
        device = problem.device(name)
        assignment = Assignment(
            device=name,
            start=first,
            stop=first + count,
            memory=memory,
            parameters=parameters,
            flops=flops,
            pass_seconds=pass_seconds(problem, device, cost, is_last=is_last),
        )
        assignments.append(assignment)
        first += count
    return tuple(assignments)


def window_assignments(
    problem: GenerateProblem[Any], layers: Layers
) -> tuple[Assignment, ...]:
    """Return the assignments of a ring.

    Layers beyond a device's memory are on its disk, so they count only as far as the memory has room.
    """
    model = problem.model
    assignments: list[Assignment] = []
    used: dict[str, float] = {}
    first = 0
    for index, (name, count) in enumerate(layers):
        device = problem.device(name)
        is_head = device.name == problem.devices[0].name
        memory = count * model.layer_memory()
        if name not in used:
            # Embedding, output matrix and buffers are counted once, with the first window.
            used[name] = 0.0
            memory += device.memory - free_memory(problem, device, holds_output=is_head)
        memory = min(memory, device.memory - used[name])
        used[name] += memory
        assignment = Assignment(
            device=name,
            start=first,
            stop=first + count,
            memory=memory,
            parameters=count * model.architecture.layer_values,
            flops=count * model.architecture.layer_flops(1, middle_position(problem)),
            pass_seconds=pass_seconds(
                problem,
                device,
                partial(model.layers_cost, count),
                is_last=index == len(layers) - 1,
            ),
        )
        assignments.append(assignment)
        first += count
    return tuple(assignments)


def cache_of(
    problem: GenerateProblem[Any], assignments: Sequence[Assignment]
) -> dict[str, float]:
    """Return the bytes for KV caches by device, for assignments of whole layers."""
    cache: dict[str, float] = {}
    for assignment in assignments:
        added = (assignment.stop - assignment.start) * problem.model.layer_cache()
        cache[assignment.device] = cache.get(assignment.device, 0.0) + added
    return cache


def shards_of(
    problem: GenerateProblem[Any], shares: Sequence[float] | None
) -> tuple[Shard, ...]:
    """Return the shard of each device: by the shares, else in proportion to how fast each decodes a layer."""
    if shares is None:
        position = middle_position(problem)
        rates = []
        for device in problem.devices:
            seconds = problem.model.layer_seconds(device, position)
            # A device that takes no time has no finite rate; such devices get equal shares.
            rates.append(1 / seconds if seconds > 0 else 1.0)
        # All devices wait for the slowest after each half of a layer, so each should take the same time.
        shares = rates
    return divide_layer(problem.model.architecture, shares)
