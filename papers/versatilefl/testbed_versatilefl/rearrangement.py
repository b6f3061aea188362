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
    """A placement of neurons and the cause of its change."""

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
    """Yield the decisions of a window: silent devices leave, groups with a poor device are rearranged.

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
        after = (
            rearrange_group(assignment, group, averages, rules.seed)
            if poor
            else assignment
        )
        if after.layers != assignment.layers:
            assignment = after
            yield Decision(assignment, "credibility", poor)


def _poor_members(
    assignment: NeuronAssignment,
    group: int,
    averages: Mapping[str, float],
    threshold: float,
) -> tuple[str, ...]:
    """Return the devices of a group with less credibility than the threshold; none if one has no credibility."""
    members = assignment.members(group)
    if not all(name in averages for name in members):
        return ()
    return tuple(name for name in members if averages[name] < threshold)


def without_device(
    assignment: NeuronAssignment, device: str, averages: Mapping[str, float], seed: int
) -> NeuronAssignment:
    """Return the assignment without a device. Raises `GroupLostError`."""
    group = assignment.group_of(device)
    after = remove_device(assignment, device, averages, seed)
    if group is not None and not after.members(group):
        first, last = assignment.groups[group][0], assignment.groups[group][-1]
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
    """Return the decision about a device without neurons, after a boot or when its casts arrive again.

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
    """None if their device is gone and they begin with initial weights."""
    taker: str


def share_neurons(weights: Sequence[float], total: int) -> list[int]:
    """Return ``neuronNum``: neurons in proportion to weights, with the remaining ones for the largest remainders.

    Each device gets at least one: a device without neurons would never be heard again. Without any weight, the division
    is even. Raises ValueError for more devices than neurons.

    >>> share_neurons([0.15, 0.6], 10)
    [2, 8]
    """
    if len(weights) > total:
        raise ValueError(f"{total} neurons are too few for {len(weights)} devices")
    summed = math.fsum(weights)
    exact = [total / len(weights)] * len(weights)
    if summed:
        exact = [total * weight / summed for weight in weights]
    # Without the margin, 0.6 / 0.75 * 10 would be slightly less than 8.
    counts = [max(1, math.floor(value + 1e-9)) for value in exact]
    while sum(counts) != total:
        step = 1 if sum(counts) < total else -1
        movable = [index for index, count in enumerate(counts) if count + step > 0]
        deficits = {index: step * (exact[index] - counts[index]) for index in movable}
        counts[max(movable, key=deficits.__getitem__)] += step
    return counts


def rearrange_group(
    assignment: NeuronAssignment,
    group: int,
    credibility: Mapping[str, float],
    seed: int,
) -> NeuronAssignment:
    """Return the same members of a group with neurons in proportion to their credibility."""
    weights = {name: credibility[name] for name in assignment.members(group)}
    return _next_assignment(
        assignment, group, [weights] * len(assignment.groups[group]), seed
    )


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
    others = [name for name in assignment.members(group) if name != device]
    # A device that has just joined has no credibility yet; with 0 it would lose all neurons that it was given.
    known = [credibility[name] for name in others if name in credibility]
    usual = math.fsum(known) / len(known) if known else 1.0
    weights = {name: credibility.get(name, usual) for name in others}
    return _next_assignment(
        assignment, group, [weights] * len(assignment.groups[group]), seed
    )


def add_device(
    assignment: NeuronAssignment, device: str, seed: int
) -> NeuronAssignment:
    """Return the assignment with another device, in the group with the fewest devices, the first one on ties.

    The device takes an even share of each layer, from the others in proportion to their neurons. A group is full if one
    of its layers has no neuron for another device; a device of the plan always finds the place that it left. Raises
    ValueError for a member, and if all groups are full.
    """
    if assignment.group_of(device) is not None:
        raise ValueError(f"{device} is a member already")
    counts = [len(assignment.members(index)) for index in range(len(assignment.groups))]
    available = []
    for index, layers in enumerate(assignment.groups):
        if counts[index] < min(assignment.sizes[layer] for layer in layers):
            available.append(index)
    if not available:
        raise ValueError(f"no group has a neuron for {device}")
    group = min(available, key=counts.__getitem__)
    weights = []
    for layer in assignment.groups[group]:
        holders = assignment.layers[layer]
        counted = {name: float(len(neurons)) for name, neurons in holders.items()}
        even_share = assignment.sizes[layer] / max(1, len(counted))
        weights.append({**counted, device: even_share})
    return _next_assignment(assignment, group, weights, seed)


def list_moves(
    before: NeuronAssignment, after: NeuronAssignment, gone: Collection[str] = ()
) -> list[Move]:
    """Return the neurons to hand over; neurons without a holder, or of ``gone`` devices, begin with initial weights."""
    moves = []
    for layer, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        givers: dict[int, str] = {}
        for name, neurons in old.items():
            if name not in gone:
                givers.update(dict.fromkeys(neurons, name))
        for taker, neurons in new.items():
            changing: dict[str | None, list[int]] = {}
            for neuron in neurons:
                giver = givers.get(neuron)
                if giver != taker:
                    changing.setdefault(giver, []).append(neuron)
            for giver, moved in changing.items():
                moves.append(Move(layer, as_channels(moved), giver, taker))
    return moves


def _next_assignment(
    assignment: NeuronAssignment,
    group: int,
    weights: Sequence[Mapping[str, float]],
    seed: int,
) -> NeuronAssignment:
    """Return the next assignment, in which the layers of a group are shared in proportion to weights."""
    layers = list(assignment.layers)
    for layer, wanted in zip(assignment.groups[group], weights, strict=True):
        # Another device may be the coordinator of the next change: draws depend on the version alone.
        draws = random.Random(
            derive(seed, "rearrangement", assignment.version + 1, layer)
        )
        layers[layer] = _share_layer(
            layers[layer], wanted, assignment.sizes[layer], draws
        )
    return replace(assignment, layers=tuple(layers), version=assignment.version + 1)


def _share_layer(
    holders: Holders, weights: Mapping[str, float], size: int, draws: random.Random
) -> dict[str, Channels]:
    """Return a layer's neurons by device: devices with too many give random ones to devices with too few."""
    if not weights:
        return {}
    counts = dict(
        zip(weights, share_neurons(list(weights.values()), size), strict=True)
    )
    kept = {}
    for name, count in counts.items():
        held = holders.get(name, ())
        kept[name] = draws.sample(held, min(count, len(held)))
    # Sorted, since the order of a set is not defined.
    free = sorted(set(range(size)).difference(*kept.values()))
    draws.shuffle(free)
    assigned = {}
    for name, count in counts.items():
        lacking = count - len(kept[name])
        assigned[name] = as_channels(kept[name] + free[:lacking])
        free = free[lacking:]
    return assigned
