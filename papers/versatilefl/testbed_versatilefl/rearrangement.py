"""How neurons are rearranged (Section V-B) in proportion to credibility, as devices leave and join. Pure.

One arrangement follows from another. Neurons move within their layer only, so that no schedule changes.
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
    """Nobody is left who could hold the neurons of a group of layers."""


@dataclass(frozen=True)
class Decision:
    """A placement of neurons with its cause."""

    arrangement: NeuronAssignment
    cause: Cause
    devices: tuple[str, ...]
    """Those that failed, retired or joined, or that are no longer credible."""
    gone: frozenset[str] = frozenset()
    """Those whose neurons begin with new weights."""


@dataclass(frozen=True)
class DecisionRules:
    """Constants of all decisions of a run."""

    threshold: float
    """C_thres: the group of a device with less credibility is rearranged."""
    lead: str
    """Scores the tests, and so it stays."""
    seed: int


def after_window(
    now: NeuronAssignment,
    failed: Iterable[str],
    averages: Mapping[str, float],
    rules: DecisionRules,
) -> Iterator[Decision]:
    """Yield the decisions of a window: silent devices leave, groups with a poor device are rearranged.

    ``averages`` are the credibilities of devices; a group with one of which there is none stays. Raises
    `GroupLostError`.
    """
    for name in failed:
        if name != rules.lead and now.group(name) is not None:
            now = without_device(now, name, averages, rules.seed)
            yield Decision(now, "failure", (name,), frozenset({name}))
    for group in range(len(now.groups)):
        poor = _poor_members(now, group, averages, rules.threshold)
        after = rearrange_group(now, group, averages, rules.seed) if poor else now
        if after.layers != now.layers:
            now = after
            yield Decision(now, "credibility", poor)


def _poor_members(
    now: NeuronAssignment, group: int, averages: Mapping[str, float], threshold: float
) -> tuple[str, ...]:
    """Return the devices of a group with less credibility than the threshold; none while one is unknown."""
    members = now.members(group)
    if not all(name in averages for name in members):
        return ()
    return tuple(name for name in members if averages[name] < threshold)


def without_device(
    now: NeuronAssignment, device: str, averages: Mapping[str, float], seed: int
) -> NeuronAssignment:
    """Return the arrangement without a device. Raises `GroupLostError`."""
    group = now.group(device)
    after = remove_device(now, device, averages, seed)
    if group is not None and not after.members(group):
        layers = now.groups[group]
        which = (
            f"layer {layers[0]}"
            if len(layers) == 1
            else f"layers {layers[0]} to {layers[-1]}"
        )
        raise GroupLostError(
            f"group {group} ({which}) is left with no device: {device} was its last"
        )
    return after


def decide_join(
    now: NeuronAssignment,
    device: str,
    averages: Mapping[str, float],
    rules: DecisionRules,
) -> Decision:
    """Return the decision about a device without neurons that has booted or is heard again.

    The lead takes its own place.
    """
    if device == rules.lead:
        return Decision(
            replace(now, version=now.version + 1),
            "join",
            (device,),
            frozenset({device}),
        )
    after = add_device(
        remove_device(now, device, averages, rules.seed), device, rules.seed
    )
    return Decision(after, "join", (device,), frozenset({device}))


def find_coordinator(now: NeuronAssignment, absent: Collection[str]) -> str | None:
    """Return the first member who is not known to be absent; who has the input layer alone hears nobody."""
    hearing = (
        name
        for group, layers in enumerate(now.groups)
        if layers[-1]
        for name in now.members(group)
    )
    return next((name for name in hearing if name not in absent), None)


@dataclass(frozen=True)
class Move:
    """Channels of a layer that change hands."""

    layer: int
    neurons: Channels
    giver: str | None
    """None: the device that held them is gone, and they begin with new weights."""
    taker: str


def share_neurons(weights: Sequence[float], total: int) -> list[int]:
    """Return ``neuronNum``: neurons shared in proportion to weights, those left over to the largest remainders.

    At least one each: a device that had nothing to send would never be heard again. Evenly where all weights are 0.
    Raises ValueError where there are more devices than neurons.
    """
    if len(weights) > total:
        raise ValueError(f"{total} neurons are too few for {len(weights)} devices")
    summed = math.fsum(weights)
    # Without the guard, 0.6 / 0.75 * 10 would be a hair below 8.
    exact = [
        total * weight / summed if summed else total / len(weights)
        for weight in weights
    ]
    found = [max(1, math.floor(value + 1e-9)) for value in exact]
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        movable = [index for index in range(len(found)) if found[index] + step > 0]
        found[max(movable, key=lambda index: step * (exact[index] - found[index]))] += (
            step
        )
    return found


def rearrange_group(
    now: NeuronAssignment, group: int, credibility: Mapping[str, float], seed: int
) -> NeuronAssignment:
    """Return the same members of a group with neurons in proportion to their credibility."""
    weights = {name: credibility[name] for name in now.members(group)}
    return _next_assignment(now, group, [weights] * len(now.groups[group]), seed)


def remove_device(
    now: NeuronAssignment, device: str, credibility: Mapping[str, float], seed: int
) -> NeuronAssignment:
    """Return the arrangement without a device: the others of its group share all neurons by their credibility.

    A group without devices keeps none; its neurons wait for a device that joins.
    """
    group = now.group(device)
    if group is None:
        return now
    others = [name for name in now.members(group) if name != device]
    # Of one that has just joined nothing is known: with no credibility it would part with all that it was given.
    known = [credibility[name] for name in others if name in credibility]
    usual = math.fsum(known) / len(known) if known else 1.0
    weights = {name: credibility.get(name, usual) for name in others}
    return _next_assignment(now, group, [weights] * len(now.groups[group]), seed)


def add_device(now: NeuronAssignment, device: str, seed: int) -> NeuronAssignment:
    """Return the arrangement with another device, in the group with the fewest; of equals the first.

    It takes an even share of each layer, from the others in proportion to what they hold. A group with a layer that has
    no neuron for one more is full; all are not, for a device that the plan has: somewhere is the place that it left.
    Raises ValueError for a member, and where all are full.
    """
    if now.group(device) is not None:
        raise ValueError(f"{device} is a member already")
    counts = [len(now.members(index)) for index in range(len(now.groups))]
    room = [
        index
        for index, count in enumerate(counts)
        if count < min(now.sizes[layer] for layer in now.groups[index])
    ]
    if not room:
        raise ValueError(f"no group has a neuron for {device}")
    group = min(room, key=lambda index: counts[index])
    weights = []
    for layer in now.groups[group]:
        held = {
            name: float(len(neurons)) for name, neurons in now.layers[layer].items()
        }
        weights.append({**held, device: now.sizes[layer] / max(1, len(held))})
    return _next_assignment(now, group, weights, seed)


def list_moves(
    before: NeuronAssignment, after: NeuronAssignment, gone: Collection[str] = ()
) -> list[Move]:
    """Return the neurons to hand over; those without a holder, or of ``gone`` devices, begin with new weights."""
    found = []
    for layer, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        held = {
            neuron: name
            for name, neurons in old.items()
            if name not in gone
            for neuron in neurons
        }
        for taker, neurons in new.items():
            own = set(old.get(taker, ())) if taker not in gone else set()
            changing: dict[str | None, list[int]] = {}
            for neuron in neurons:
                if neuron not in own:
                    changing.setdefault(held.get(neuron), []).append(neuron)
            found += [
                Move(layer, as_channels(each), giver, taker)
                for giver, each in changing.items()
            ]
    return found


def _next_assignment(
    now: NeuronAssignment, group: int, weights: Sequence[Mapping[str, float]], seed: int
) -> NeuronAssignment:
    """Return the next arrangement, in which the layers of a group are shared in proportion to weights."""
    layers = list(now.layers)
    for layer, wanted in zip(now.groups[group], weights, strict=True):
        draws = random.Random(derive(seed, "rearrangement", now.version + 1, layer))
        layers[layer] = _share_layer(layers[layer], wanted, now.sizes[layer], draws)
    return replace(now, layers=tuple(layers), version=now.version + 1)


def _share_layer(
    holders: Holders, weights: Mapping[str, float], size: int, draws: random.Random
) -> dict[str, Channels]:
    """Return a layer's neurons by device: those with too many give some by chance, those with too few take them."""
    if not weights:
        return {}
    counts = dict(
        zip(weights, share_neurons(list(weights.values()), size), strict=True)
    )
    kept = {}
    for name, count in counts.items():
        held = holders.get(name, ())
        kept[name] = draws.sample(held, min(count, len(held)))
    free = sorted(
        set(range(size)) - {neuron for neurons in kept.values() for neuron in neurons}
    )
    draws.shuffle(free)
    found = {}
    for name, count in counts.items():
        lacking = count - len(kept[name])
        found[name] = as_channels(kept[name] + free[:lacking])
        free = free[lacking:]
    return found
