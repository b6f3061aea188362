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
    """Raised if the last device of a group of layers has gone."""


@dataclass(frozen=True)
class Decision:
    """A new assignment of neurons, with the cause of the change."""

    assignment: NeuronAssignment
    cause: Cause
    devices: tuple[str, ...]
    """The devices that failed, retired or joined, or whose credibility is too low."""
    gone: frozenset[str] = frozenset()
    """The devices whose neurons begin with initial weights."""


@dataclass(frozen=True)
class DecisionRules:
    """Constants of all decisions of a run."""

    threshold: float
    """C_thres: the group of a device with less credibility is rearranged."""
    coordinator: str
    """The device that scores the tests and therefore keeps its place."""
    seed: int


def decide_after_window(
    assignment: NeuronAssignment,
    failed: Iterable[str],
    averages: Mapping[str, float],
    rules: DecisionRules,
) -> Iterator[Decision]:
    """Yield the decisions after a window: silent devices leave, groups with a poor device are rearranged.

    ``averages`` are the credibilities of devices; a group with a device without credibility stays. Raises
    `GroupLostError`.
    """
    for name in failed:
        # Without the coordinator nobody would score the tests: the run fails with it.
        if name != rules.coordinator and assignment.group_of(name) is not None:
            assignment = without_device(assignment, name, averages, rules.seed)
            yield Decision(assignment, "failure", (name,), frozenset({name}))
    for group in range(len(assignment.groups)):
        poor = _poor_members(assignment, group, averages, rules.threshold)
        if not poor:
            continue
        after = rearrange_group(assignment, group, averages, rules.seed)
        # Credibilities in the same proportion as before move no neuron.
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
    """Return the assignment without a device. Raises `GroupLostError`."""
    group = assignment.group_of(device)
    after = remove_device(assignment, device, averages, seed)
    if group is not None and not after.members(group):
        own_layers = assignment.groups[group]
        first, last = own_layers[0], own_layers[-1]
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
    """Return the decision about a device without neurons, which has booted or whose casts arrive again.

    The coordinator returns to its own place.
    """
    if device == rules.coordinator:
        after = replace(assignment, version=assignment.version + 1)
    else:
        # Whoever restarts before its failure was noticed still has a place, and loses it here.
        others = remove_device(assignment, device, averages, rules.seed)
        after = add_device(others, device, rules.seed)
    return Decision(after, "join", (device,), frozenset({device}))


def find_coordinator(
    assignment: NeuronAssignment, absent: Collection[str]
) -> str | None:
    """Return the first member outside ``absent``; None without such a member.

    Devices of the input layer alone receive no casts, and so cannot decide.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> assignment = partition_neurons([4, 4, 4, 4], ["a", "b", "c", "d"])
    >>> find_coordinator(assignment, absent=()), find_coordinator(assignment, absent={"a", "b"})
    ('a', 'c')
    """
    for group, layers in enumerate(assignment.groups):
        if layers[-1] == 0:
            continue
        for name in assignment.members(group):
            if name not in absent:
                return name
    return None


@dataclass(frozen=True)
class Move:
    """Neurons of a layer with their old and new device."""

    layer: int
    neurons: Channels
    giver: str | None
    """None if the previous device is gone, so that the neurons begin with initial weights."""
    taker: str


def share_neurons(proportions: Sequence[float], total: int) -> list[int]:
    """Return Section V-B's ``neuronNum``: numbers of neurons in given proportions.

    Devices with the largest remainders get the neurons that rounding leaves. Each device gets at least one: the others
    would never receive a cast of a device without neurons again. If all proportions are 0, the division is even. Raises
    ValueError for more devices than neurons.

    >>> share_neurons([0.15, 0.6], 10)
    [2, 8]
    """
    if len(proportions) > total:
        raise ValueError(f"{total} neurons are too few for {len(proportions)} devices")
    summed = math.fsum(proportions)
    if summed:
        exact = [total * proportion / summed for proportion in proportions]
    else:
        # Proportions of zero say nothing about the devices.
        exact = [total / len(proportions)] * len(proportions)
    # Without the margin, 0.6 / 0.75 * 10 would be slightly less than 8.
    counts = [max(1, math.floor(value + 1e-9)) for value in exact]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        deficits = {}
        for index, count in enumerate(counts):
            # No device may fall to zero neurons.
            if count + step > 0:
                deficits[index] = step * (exact[index] - count)
        # `max` returns the first of equal deficits, so that all devices compute the same numbers.
        most_lacking = max(deficits, key=deficits.__getitem__)
        counts[most_lacking] += step
    return counts


def rearrange_group(
    assignment: NeuronAssignment,
    group: int,
    credibility: Mapping[str, float],
    seed: int,
) -> NeuronAssignment:
    """Return the same members of a group with neurons in proportion to their credibility."""
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
    """Return the assignment without a device: the rest of the group shares all neurons by credibility.

    A group without devices keeps none; its neurons wait for a device that joins.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> after = remove_device(partition_neurons([6, 6], ["a", "b", "c"], "horizontal"), "b", {}, seed=1)
    >>> after.devices, [len(neurons) for neurons in after.layers[1].values()]
    (('a', 'c'), [3, 3])
    """
    group = assignment.group_of(device)
    if group is None:
        return assignment
    others = []
    known = []
    for name in assignment.members(group):
        if name == device:
            continue
        others.append(name)
        if name in credibility:
            known.append(credibility[name])
    # A device that has just joined has no credibility yet; with 0 it would lose all neurons that it was given.
    usual = math.fsum(known) / len(known) if known else 1.0
    proportions = {name: credibility.get(name, usual) for name in others}
    layer_count = len(assignment.groups[group])
    return _next_assignment(assignment, group, [proportions] * layer_count, seed)


def add_device(
    assignment: NeuronAssignment, device: str, seed: int
) -> NeuronAssignment:
    """Return the assignment with another device, in the group with the fewest devices, the first one on ties.

    Section V-A inserts joining devices "into a layer-wise set with the least number of devices". The device takes an
    even share of each layer, from the others in proportion to their neurons. A group is full if one of its layers has
    no neuron for another device; a device of the plan always finds the place that it left. Raises ValueError for a
    member, and if all groups are full.

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
        # The mean of the present devices, so that the new one gets an even share of the layer.
        counts[device] = assignment.sizes[layer] / max(1, len(holders))
        proportions.append(counts)
    return _next_assignment(assignment, group, proportions, seed)


def list_moves(
    before: NeuronAssignment, after: NeuronAssignment, gone: Collection[str] = ()
) -> list[Move]:
    """Return the neurons to hand over; neurons without a holder, or of ``gone`` devices, begin with initial weights.

    >>> from testbed.ml.slots.arrangement import partition_neurons
    >>> before = partition_neurons([4], ["a", "b"], "horizontal")
    >>> list_moves(before, remove_device(before, "b", {}, seed=1))
    [Move(layer=0, neurons=range(2, 4), giver='b', taker='a')]
    """
    moves = []
    for layer, holders_after in enumerate(after.layers):
        givers = _holder_by_neuron(before.layers[layer], gone)
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


def _holder_by_neuron(holders: Holders, gone: Collection[str]) -> dict[int, str]:
    """Return the present device of each neuron of a layer; neurons of ``gone`` devices have none."""
    by_neuron: dict[int, str] = {}
    for name, neurons in holders.items():
        if name not in gone:
            by_neuron.update(dict.fromkeys(neurons, name))
    return by_neuron


def _next_assignment(
    assignment: NeuronAssignment,
    group: int,
    proportions: Sequence[Mapping[str, float]],
    seed: int,
) -> NeuronAssignment:
    """Return the next assignment: devices share each layer of a group in the given proportions."""
    version = assignment.version + 1
    layers = list(assignment.layers)
    for layer, of_layer in zip(assignment.groups[group], proportions, strict=True):
        # Another device may be the coordinator of the next change: draws depend on the version alone.
        draws = random.Random(derive(seed, "rearrangement", version, layer))
        size = assignment.sizes[layer]
        layers[layer] = _share_layer(layers[layer], of_layer, size, draws)
    return replace(assignment, layers=tuple(layers), version=version)


def _share_layer(
    holders: Holders, proportions: Mapping[str, float], size: int, draws: random.Random
) -> dict[str, Channels]:
    """Return a layer's neurons by device: devices with too many give random ones to devices with too few."""
    if not proportions:
        return {}
    shares = share_neurons(list(proportions.values()), size)
    counts = dict(zip(proportions, shares, strict=True))
    kept = {}
    for name, count in counts.items():
        present = holders.get(name, ())
        kept_count = min(count, len(present))
        # Section V-B: a device with too many neurons "randomly selects" those that it passes on.
        kept[name] = draws.sample(present, kept_count)
    every = set(range(size))
    # Sorted, since the order of a set is not defined.
    free = sorted(every.difference(*kept.values()))
    draws.shuffle(free)
    assigned = {}
    for name, count in counts.items():
        lacking = count - len(kept[name])
        neurons = kept[name] + free[:lacking]
        assigned[name] = as_channels(neurons)
        free = free[lacking:]
    return assigned
