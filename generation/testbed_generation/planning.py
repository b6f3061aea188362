"""Inputs of the planners, and assignments from the planners' results. Pure functions without torch.

`make_placement_problem`, `make_ring` and `make_shards` describe the devices of a `GenerateProblem` to
`testbed_generation.placement`, `ring` and `sharding`; `make_stage_assignments` and `make_window_assignments` turn
numbers of layers into the assignments of a plan.
"""

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
from testbed_generation.placement import LayerCounts, PlacementProblem
from testbed_generation.ring import Member, Ring
from testbed_generation.sharding import Shard, divide_layer
from testbed_generation.workload import GenerateProblem

TOKEN_MESSAGE_BYTES = 64
"""Approximate bytes of the message with a chosen token."""

PARTITION_RULES: dict[str, Callable[[PlacementProblem], LayerCounts]] = {
    "even": placement.divide_evenly,
    "memory": placement.divide_by_memory,
    "latency": placement.minimize_latency,
    "throughput": placement.minimize_bottleneck,
}
"""Rules that divide layers, by their names in scenarios."""


def middle_position(problem: GenerateProblem[Any]) -> int:
    """Return the number of cached tokens in the middle of a text of mean length, for which times are predicted."""
    return mean_prompt(problem) + problem.workload.tokens // 2


def mean_prompt(problem: GenerateProblem[Any]) -> int:
    """Return the mean length of the prompts in tokens, rounded; 1 without requests."""
    lengths = [len(request.prompt) for request in problem.requests] or [1]
    return round(sum(lengths) / len(lengths))


def pass_seconds(
    problem: GenerateProblem[Any],
    device: DeviceSpec,
    cost: Callable[[int, int], Cost],
    *,
    is_last: bool,
) -> dict[str, float]:
    """Return a device's computing time for a prompt of mean length, and for one token in the middle of a text.

    ``cost`` is a function of the number of tokens and of the number of cached tokens before them. The last device also
    chooses a token. Reads from a disk are not included.
    """
    output_cost = problem.model.output_cost(1) if is_last else Cost()
    prompt_tokens = mean_prompt(problem)
    prompt_cost = cost(prompt_tokens, 0) + output_cost
    token_cost = cost(1, middle_position(problem)) + output_cost
    return {
        f"prefill of {prompt_tokens}": device.seconds(prompt_cost),
        "token": device.seconds(token_cost),
    }


def layer_capacity(problem: GenerateProblem[Any], device: DeviceSpec) -> int:
    """Return the number of layers for which a device has memory, beside embedding, output matrix and buffers.

    Only the coordinator holds the embedding. The output matrix is counted on every device, since any device may be the
    last one.
    """
    memory = free_memory(problem, device, holds_output=True)
    return max(0, math.floor(memory / problem.model.layer_memory()))


def free_memory(
    problem: GenerateProblem[Any], device: DeviceSpec, *, holds_output: bool
) -> float:
    """Return the bytes available for layers on a device; negative if everything else does not fit.

    Everything else is buffers, the output matrix if ``holds_output``, and embedding and draft model on the coordinator.
    """
    model = problem.model
    is_coordinator = device.name == problem.devices[0].name
    memory = device.memory - model.buffer_memory()
    memory -= model.end_memory(has_embedding=is_coordinator, has_output=holds_output)
    if is_coordinator and problem.draft is not None:
        memory -= problem.draft.total_memory()
    return memory


def message_time(
    problem: GenerateProblem[Any], size: int
) -> Callable[[str, str], float]:
    """Return a function of sender and receiver: the seconds of sending ``size`` bytes; infinite without a link."""

    def message_seconds(sender: str, receiver: str) -> float:
        link = problem.links.get((sender, receiver))
        if link is None:
            return math.inf
        # Rates are those of Ethernet frames, so headers count.
        return link.transmission_time(size_around(size)) + link.delay

    return message_seconds


def make_placement_problem(
    problem: GenerateProblem[Any], names: Sequence[str]
) -> PlacementProblem:
    """Return the inputs for choosing among devices and dividing layers; the coordinator is the first device."""
    model = problem.model
    # Reading the cache takes longer the longer the text is; the middle of the text gives the mean.
    position = middle_position(problem)
    layer_seconds = {}
    capacity = {}
    output_matrix_seconds = {}
    for name in names:
        device = problem.device(name)
        layer_seconds[name] = model.layer_seconds(device, position)
        capacity[name] = layer_capacity(problem, device)
        output_matrix_seconds[name] = device.seconds(model.output_cost(1))
    return PlacementProblem(
        devices=tuple(names),
        layers=model.architecture.layers,
        layer_seconds=layer_seconds,
        capacity=capacity,
        message_seconds=message_time(problem, model.message_bytes(1)),
        # The last device chooses the token, and sends its number instead of activations.
        token_message_seconds=message_time(problem, TOKEN_MESSAGE_BYTES),
        output_matrix_seconds=output_matrix_seconds,
    )


def make_ring(
    problem: GenerateProblem[Any],
    names: Sequence[str],
    disk_rates: Mapping[str, float],
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
            layer_seconds=model.layer_seconds(device, position),
            memory=free_memory(problem, device, holds_output=is_head),
            disk_rate=disk_rates.get(name),
        )
        members.append(member)
    head = problem.device(names[0])
    return Ring(
        tuple(members),
        layers=model.architecture.layers,
        layer_bytes=model.layer_memory(),
        message_seconds=message_time(problem, model.message_bytes(1)),
        output_seconds=head.seconds(model.output_cost(1)),
        prefetch=prefetch,
    )


def devices_without_spares(
    problem: GenerateProblem[Any], spares: Collection[str]
) -> list[str]:
    """Return the names of all devices except the spares, in the order of the scenario, the coordinator first."""
    return [device.name for device in problem.devices if device.name not in spares]


def make_stage_assignments(
    problem: GenerateProblem[Any], layer_counts: LayerCounts
) -> tuple[Assignment, ...]:
    """Return the assignments of stages staying in memory, for consecutive ranges of layers."""
    model = problem.model
    assignments = []
    start = 0
    for index, (name, count) in enumerate(layer_counts):
        is_first, is_last = index == 0, index == len(layer_counts) - 1
        ends = model.end_memory(has_embedding=is_first, has_output=is_last)
        memory = count * model.layer_memory() + ends + model.buffer_memory()
        # The first stage is on the coordinator, which holds the draft model.
        if is_first and problem.draft is not None:
            memory += problem.draft.total_memory()
        parameters = count * model.architecture.layer_values
        flops = model.architecture.layer_flops(1, middle_position(problem)) * count
        cost = partial(model.layers_cost, count)
        device = problem.device(name)
        assignment = Assignment(
            device=name,
            start=start,
            stop=start + count,
            memory=memory,
            parameters=parameters,
            flops=flops,
            pass_seconds=pass_seconds(problem, device, cost, is_last=is_last),
        )
        assignments.append(assignment)
        start += count
    return tuple(assignments)


def make_window_assignments(
    problem: GenerateProblem[Any], layer_counts: LayerCounts
) -> tuple[Assignment, ...]:
    """Return the assignments of the windows of a ring.

    Layers beyond a device's memory are on its disk. Therefore the memory of an assignment is at most the device's free
    memory.
    """
    model = problem.model
    assignments: list[Assignment] = []
    assigned_memory: dict[str, float] = {}
    """Bytes of the assignments of each device so far."""
    start = 0
    for index, (name, count) in enumerate(layer_counts):
        device = problem.device(name)
        is_head = device.name == problem.devices[0].name
        memory = count * model.layer_memory()
        if name not in assigned_memory:
            # Embedding, output matrix and buffers are counted once, with the first window.
            assigned_memory[name] = 0.0
            memory += device.memory - free_memory(problem, device, holds_output=is_head)
        memory = min(memory, device.memory - assigned_memory[name])
        assigned_memory[name] += memory
        assignment = Assignment(
            device=name,
            start=start,
            stop=start + count,
            memory=memory,
            parameters=count * model.architecture.layer_values,
            flops=count * model.architecture.layer_flops(1, middle_position(problem)),
            pass_seconds=pass_seconds(
                problem,
                device,
                partial(model.layers_cost, count),
                is_last=index == len(layer_counts) - 1,
            ),
        )
        assignments.append(assignment)
        start += count
    return tuple(assignments)


def device_cache_bytes(
    problem: GenerateProblem[Any], assignments: Sequence[Assignment]
) -> dict[str, float]:
    """Return the bytes for KV caches by device, for assignments of whole layers."""
    cache_bytes: dict[str, float] = {}
    for assignment in assignments:
        layers = assignment.stop - assignment.start
        earlier_bytes = cache_bytes.get(assignment.device, 0.0)
        added_bytes = layers * problem.model.layer_cache()
        cache_bytes[assignment.device] = earlier_bytes + added_bytes
    return cache_bytes


def make_shards(
    problem: GenerateProblem[Any], shares: Sequence[float] | None
) -> tuple[Shard, ...]:
    """Return the shard of each device by ``shares``; None: in proportion to the devices' decoding rates."""
    if shares is None:
        position = middle_position(problem)
        rates = []
        for device in problem.devices:
            seconds = problem.model.layer_seconds(device, position)
            # The rate of a device that takes no time is infinite; such devices get equal shares.
            rates.append(1 / seconds if seconds > 0 else 1.0)
        # All devices wait for the slowest one after each half of a layer, so each should take the same time.
        shares = rates
    return divide_layer(problem.model.architecture, shares)
