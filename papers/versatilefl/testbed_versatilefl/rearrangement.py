"""Rearrangement of neurons (Section V-B) in proportion to credibility, as devices leave and join.

Each function computes an assignment from another one. Neurons move within their layer only, so that no schedule
changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from testbed.common.errors import TestbedError
from testbed.common.seeds import derive
from testbed.ml.models.slices import Channels, as_channels
from testbed.ml.slots.arrangement import Holders, NeuronAssignment

Cause = Literal["failure", "credibility", "retirement", "join"]


class GroupLostError(TestbedError):
    """Raised if a group of layers has lost its last device."""


@dataclass(frozen=True)
class Decision:
    """A new assignment of neurons, with the cause of the change."""

    assignment: NeuronAssignment
    cause: Cause
    devices: tuple[str, ...]
    """The devices that failed, retired or joined, or whose credibility is too low."""
    devices_without_weights: frozenset[str] = frozenset()
    """Devices that failed or restarted: the neurons that they had before the change begin with initial weights."""


@dataclass(frozen=True)
class DecisionRules:
    """Constants of all decisions of a run."""

    threshold: float
    """C_thres: the group of a device with less credibility is rearranged."""
    coordinator: str
    """The device that scores the tests and therefore keeps its place."""
    seed: int
    """Seed of the run, from which random choices of neurons are derived."""


def decide_after_window(
    assignment: NeuronAssignment,
    failed: Iterable[str],
    averages: Mapping[str, float],
    rules: DecisionRules,
) -> Iterator[Decision]:
    """Yield the decisions after a window: ``failed`` devices leave, and groups with a poor device are rearranged.

    A device is poor if its credibility is below the threshold. ``averages`` are the credibilities of devices; a group
    with a device without credibility is not rearranged. Raises `GroupLostError`.
    """
    for name in failed:
        # The coordinator stays: no other device scores the tests, so that the run fails without it.
        if name != rules.coordinator and assignment.group_of(name) is not None:
            assignment = without_device(assignment, name, averages, rules.seed)
            yield Decision(assignment, "failure", (name,), frozenset({name}))
    for group in range(len(assignment.groups)):
        poor = _poor_members(assignment, group, averages, rules.threshold)
        if not poor:
            continue
        after = rearrange_group(assignment, group, averages, rules.seed)
        # If the proportions of the credibilities have not changed, no neuron moves.
        if after.layers != assignment.layers:
            assignment = after
            yield Decision(assignment, "credibility", poor)


def _poor_members(
    assignment: NeuronAssignment,
    group: int,
    averages: Mapping[str, float],
    threshold: float,
) -> tuple[str, ...]:
    """Return the devices of a group with less credibility than the threshold (Section V-B: C_s < C_thres).

    Empty if a device of the group has no credibility yet.
    """
    poor = []
    for name in assignment.members(group):
        # A device that has joined has no credibility until a whole window is over.
        if name not in averages:
            return ()
        if averages[name] < threshold:
            poor.append(name)
    return tuple(poor)


def without_device(
    assignment: NeuronAssignment, device: str, averages: Mapping[str, float], seed: int
) -> NeuronAssignment:
    """Return the assignment without a device. Raises `GroupLostError` if the device was the last one of its group."""
    group = assignment.group_of(device)
    after = remove_device(assignment, device, averages, seed)
    if group is not None and not after.members(group):
        group_layers = assignment.groups[group]
        first = group_layers[0]
        last = group_layers[-1]
        layers = f"layer {first}" if first == last else f"layers {first} to {last}"
        raise GroupLostError(
            f"group {group} ({layers}) is left with no device: {device} was its last"
        )
    return after


def decide_join(
    assignment: NeuronAssignment,
    device: str,
    averages: Mapping[str, float],
    rules: DecisionRules,
) -> Decision:
    """Return the decision about a device that asks for neurons: it has booted, or its casts arrive again.

    The coordinator returns to its former place.
    """
    if device == rules.coordinator:
        after = replace(assignment, version=assignment.version + 1)
    else:
        # A device that restarts before its failure was noticed is still in the assignment, and is removed first.
        without = remove_device(assignment, device, averages, rules.seed)
        after = add_device(without, device, rules.seed)
    return Decision(after, "join", (device,), frozenset({device}))


def find_coordinator(
    assignment: NeuronAssignment, excluded: Collection[str]
) -> str | None:
    """Return the acting coordinator: the first device of the assignment that is not ``excluded``; None without one.

    Devices that have the input layer alone receive no casts, so they cannot decide.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> assignment = partition_neurons([4, 4, 4, 4], ["a", "b", "c", "d"])
    >>> find_coordinator(assignment, excluded=()), find_coordinator(assignment, excluded={"a", "b"})
    ('a', 'c')
    """
    for group, layers in enumerate(assignment.groups):
        if layers[-1] == 0:
            continue
        for name in assignment.members(group):
            if name not in excluded:
                return name
    return None


@dataclass(frozen=True)
class Move:
    """Neurons of a layer with their old and new device."""

    layer: int
    neurons: Channels
    giver: str | None
    """The old device; None if no device has the weights, so that the neurons begin with initial weights."""
    taker: str
    """The new device."""


def share_neurons(proportions: Sequence[float], total: int) -> list[int]:
    """Return Section V-B's ``neuronNum``: numbers of neurons in given proportions.

    Devices with the largest remainders get the neurons that rounding leaves over. Each device gets at least one neuron,
    since a device without neurons would never cast again. If all proportions are 0, the division is even. Raises
    ValueError for more devices than neurons.

    >>> share_neurons([0.15, 0.6], 10)
    [2, 8]
    """
    if len(proportions) > total:
        raise ValueError(f"{total} neurons are too few for {len(proportions)} devices")
    sum_of_proportions = math.fsum(proportions)
    if sum_of_proportions:
        exact = [total * proportion / sum_of_proportions for proportion in proportions]
    else:
        exact = [total / len(proportions)] * len(proportions)
    # Without the margin, 0.6 / 0.75 * 10 would be slightly less than 8.
    counts = [max(1, math.floor(value + 1e-9)) for value in exact]
    while sum(counts) != total:
        change = 1 if sum(counts) < total else -1
        # By how much the change of each count brings it closer to its exact value.
        gains = {}
        for index, count in enumerate(counts):
            # Each device keeps at least one neuron.
            if count + change > 0:
                gains[index] = change * (exact[index] - count)
        # `max` returns the first of equal gains, so that all devices compute the same numbers.
        best = max(gains, key=gains.__getitem__)
        counts[best] += change
    return counts


def rearrange_group(
    assignment: NeuronAssignment,
    group: int,
    credibility: Mapping[str, float],
    seed: int,
) -> NeuronAssignment:
    """Return the assignment in which the devices of a group have neurons in proportion to their credibility."""
    proportions = {}
    for name in assignment.members(group):
        proportions[name] = credibility[name]
    layer_count = len(assignment.groups[group])
    return _next_assignment(assignment, group, [proportions] * layer_count, seed)


def remove_device(
    assignment: NeuronAssignment,
    device: str,
    credibility: Mapping[str, float],
    seed: int,
) -> NeuronAssignment:
    """Return the assignment without a device: the other devices of the group share all neurons by credibility.

    If the device was the only one of its group, no device has the group's neurons until one joins.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> after = remove_device(partition_neurons([6, 6], ["a", "b", "c"], "horizontal"), "b", {}, seed=1)
    >>> after.devices, [len(neurons) for neurons in after.layers[1].values()]
    (('a', 'c'), [3, 3])
    """
    group = assignment.group_of(device)
    if group is None:
        return assignment
    others = []
    values = []
    for name in assignment.members(group):
        if name == device:
            continue
        others.append(name)
        if name in credibility:
            values.append(credibility[name])
    # A device that has just joined has no credibility yet, and counts with the mean of the others: with 0 it would lose
    # nearly all neurons that it was given.
    default = math.fsum(values) / len(values) if values else 1.0
    proportions = {name: credibility.get(name, default) for name in others}
    layer_count = len(assignment.groups[group])
    return _next_assignment(assignment, group, [proportions] * layer_count, seed)


def add_device(
    assignment: NeuronAssignment, device: str, seed: int
) -> NeuronAssignment:
    """Return the assignment with another device, in the group with the fewest devices, the first one on ties.

    Section V-A inserts joining devices "into a layer-wise set with the least number of devices". The device takes an
    even share of each layer, from the other devices in proportion to their neurons. A group is full if one of its
    layers has no neuron for another device; a device of the plan always finds the place that it left. Raises ValueError
    if the device has neurons already, or if all groups are full.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> after = add_device(partition_neurons([6, 6], ["a", "b"], "horizontal"), "c", seed=1)
    >>> [len(neurons) for neurons in after.layers[1].values()]
    [2, 2, 2]
    """
    if assignment.group_of(device) is not None:
        raise ValueError(f"{device} is a member already")
    member_counts = {}
    for index, layers in enumerate(assignment.groups):
        count = len(assignment.members(index))
        smallest_layer = min(assignment.sizes[layer] for layer in layers)
        # Each device needs a neuron of every layer of its group.
        if count < smallest_layer:
            member_counts[index] = count
    if not member_counts:
        raise ValueError(f"no group has a neuron for {device}")
    group = min(member_counts, key=member_counts.__getitem__)
    proportions = []
    for layer in assignment.groups[group]:
        holders = assignment.layers[layer]
        counts = {}
        for name, neurons in holders.items():
            counts[name] = float(len(neurons))
        # The mean number of the other devices' neurons, so that the new device gets an even share of the layer.
        counts[device] = assignment.sizes[layer] / max(1, len(holders))
        proportions.append(counts)
    return _next_assignment(assignment, group, proportions, seed)


def list_moves(
    before: NeuronAssignment,
    after: NeuronAssignment,
    devices_without_weights: Collection[str] = (),
) -> list[Move]:
    """Return the neurons moving to another device between two assignments.

    Neurons that had no device, or one of ``devices_without_weights``, begin with initial weights.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> before = partition_neurons([4], ["a", "b"], "horizontal")
    >>> list_moves(before, remove_device(before, "b", {}, seed=1))
    [Move(layer=0, neurons=range(2, 4), giver='b', taker='a')]
    """
    moves = []
    for layer, holders_after in enumerate(after.layers):
        givers = _holder_by_neuron(before.layers[layer], devices_without_weights)
        for taker, neurons in holders_after.items():
            moved_from: dict[str | None, list[int]] = {}
            for neuron in neurons:
                giver = givers.get(neuron)
                if giver != taker:
                    moved_from.setdefault(giver, []).append(neuron)
            for giver, moved in moved_from.items():
                channels = as_channels(moved)
                moves.append(Move(layer, channels, giver, taker))
    return moves


def _holder_by_neuron(
    holders: Holders, devices_without_weights: Collection[str]
) -> dict[int, str]:
    """Return the device with the weights of each neuron of a layer, without neurons whose weights are lost."""
    by_neuron: dict[int, str] = {}
    for name, neurons in holders.items():
        if name not in devices_without_weights:
            by_neuron.update(dict.fromkeys(neurons, name))
    return by_neuron


def _next_assignment(
    assignment: NeuronAssignment,
    group: int,
    proportions: Sequence[Mapping[str, float]],
    seed: int,
) -> NeuronAssignment:
    """Return the next version of an assignment, in which devices share each layer of a group by ``proportions``.

    ``proportions`` has a mapping from devices to numbers for each layer of the group.
    """
    version = assignment.version + 1
    layers = list(assignment.layers)
    group_layers = assignment.groups[group]
    for layer, proportions_in_layer in zip(group_layers, proportions, strict=True):
        # Draws depend on version and layer alone, since another device may be the acting coordinator of the next
        # change.
        draws = random.Random(derive(seed, "rearrangement", version, layer))
        size = assignment.sizes[layer]
        layers[layer] = _share_layer(layers[layer], proportions_in_layer, size, draws)
    return replace(assignment, layers=tuple(layers), version=version)


def _share_layer(
    holders: Holders, proportions: Mapping[str, float], size: int, draws: random.Random
) -> dict[str, Channels]:
    """Return the neurons of each device of a layer: devices with too many give random ones to devices with too few."""
    if not proportions:
        return {}
    shares = share_neurons(list(proportions.values()), size)
    counts = dict(zip(proportions, shares, strict=True))
    kept_neurons = {}
    for name, count in counts.items():
        former_neurons = holders.get(name, ())
        kept_count = min(count, len(former_neurons))
        # Section V-B: a device with too many neurons "randomly selects" the neurons that it passes on.
        kept_neurons[name] = draws.sample(former_neurons, kept_count)
    all_neurons = set(range(size))
    # Sorted, since the order of a set is not defined.
    free_neurons = sorted(all_neurons.difference(*kept_neurons.values()))
    draws.shuffle(free_neurons)
    neurons_by_device = {}
    for name, count in counts.items():
        missing_count = count - len(kept_neurons[name])
        neurons = kept_neurons[name] + free_neurons[:missing_count]
        neurons_by_device[name] = as_channels(neurons)
        free_neurons = free_neurons[missing_count:]
    return neurons_by_device
