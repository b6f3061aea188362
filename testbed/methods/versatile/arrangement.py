"""Who holds which neurons, and how that changes (Section V-B): in proportion to credibility, as devices leave and join.

Pure: one arrangement follows from another. Channels move within their layer only, so that no schedule changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from testbed.common.seeds import derive
from testbed.kits.slots.partition import Partition
from testbed.models.slices import NONE, Channels, as_channels

Holders = Mapping[str, Channels]
"""The neurons of one layer, by device; every member of the layer's group has at least one."""


@dataclass(frozen=True)
class Arrangement:
    """Groups of adjacent layers, and the neurons that the members of each hold."""

    groups: tuple[range, ...]
    sizes: tuple[int, ...]
    """Channels by layer, the input layer first."""
    layers: tuple[Holders, ...]
    """By layer; all layers of a group have the same devices, in the same order."""
    version: int = 0

    def group(self, device: str) -> int | None:
        """Return which group a device is a member of; None: of none."""
        return next((index for index in range(len(self.groups)) if device in self.members(index)), None)

    def members(self, group: int) -> tuple[str, ...]:
        """Return the devices of a group."""
        return tuple(self.layers[self.groups[group].start])

    @property
    def devices(self) -> tuple[str, ...]:
        """All members, group after group."""
        return tuple(name for group in range(len(self.groups)) for name in self.members(group))

    def senders(self, receiver: str) -> tuple[str, ...]:
        """Return the other devices that cast to one: outputs of the layer before, losses of the one behind, results."""
        own = self.group(receiver)
        if own is None:
            return ()
        mine, last = self.groups[own], len(self.sizes) - 1

        def casts(layers: range) -> bool:
            return any(at - 1 in layers or (at >= 1 and at + 1 in layers) or at == last in layers for at in mine)

        return tuple(
            name
            for group, layers in enumerate(self.groups)
            if casts(layers)
            for name in self.members(group)
            if name != receiver
        )

    def again(self) -> Arrangement:
        """Return the same as a newer arrangement."""
        return replace(self, version=self.version + 1)

    def of(self, device: str, layer: int) -> Channels:
        """Return a device's neurons of a layer; none of a layer that is not its own."""
        return self.layers[layer].get(device, NONE)


@dataclass(frozen=True)
class Move:
    """Channels of a layer that change hands."""

    layer: int
    neurons: Channels
    giver: str | None
    """None: the device that held them is gone, and they begin with new weights."""
    taker: str


def arrangement_of(division: Partition, devices: Sequence[str]) -> Arrangement:
    """Return a division with its devices, one a super neuron."""
    layers: list[dict[str, Channels]] = [{} for _ in division.neurons]
    for part, name in zip(division.super_neurons, devices, strict=True):
        for layer in part.layers:
            layers[layer][name] = part.of(layer)
    return Arrangement(division.groups, division.neurons, tuple(layers))


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return ``neuronNum``: neurons shared in proportion to weights, those left over to the largest remainders.

    At least one each: a device that had nothing to send would never be heard again. Evenly where all weights are 0.
    Raises ValueError where there are more devices than neurons.
    """
    if len(weights) > total:
        raise ValueError(f"{total} neurons are too few for {len(weights)} devices")
    summed = math.fsum(weights)
    # Without the guard, 0.6 / 0.75 * 10 would be a hair below 8.
    exact = [total * weight / summed if summed else total / len(weights) for weight in weights]
    found = [max(1, math.floor(value + 1e-9)) for value in exact]
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        movable = [index for index in range(len(found)) if found[index] + step > 0]
        found[max(movable, key=lambda index: step * (exact[index] - found[index]))] += step
    return found


def rearranged(now: Arrangement, group: int, credibility: Mapping[str, float], seed: int) -> Arrangement:
    """Return the same members of a group with neurons in proportion to their credibility."""
    weights = {name: credibility[name] for name in now.members(group)}
    return _with(now, group, [weights] * len(now.groups[group]), seed)


def left(now: Arrangement, device: str, credibility: Mapping[str, float], seed: int) -> Arrangement:
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
    return _with(now, group, [weights] * len(now.groups[group]), seed)


def joined(now: Arrangement, device: str, seed: int) -> Arrangement:
    """Return the arrangement with another device, in the group with the fewest; of equals the first.

    It takes an even share of each layer, from the others in proportion to what they hold. A group with a layer that has
    no neuron for one more is full; all are not, for a device that the plan has: somewhere is the place that it left.
    Raises ValueError for a member, and where all are full.
    """
    if now.group(device) is not None:
        raise ValueError(f"{device} is a member already")
    counts = [len(now.members(index)) for index in range(len(now.groups))]
    room = [index for index, count in enumerate(counts) if count < min(now.sizes[layer] for layer in now.groups[index])]
    if not room:
        raise ValueError(f"no group has a neuron for {device}")
    group = min(room, key=lambda index: counts[index])
    weights = []
    for layer in now.groups[group]:
        held = {name: float(len(neurons)) for name, neurons in now.layers[layer].items()}
        weights.append({**held, device: now.sizes[layer] / max(1, len(held))})
    return _with(now, group, weights, seed)


def moves(before: Arrangement, after: Arrangement, gone: Collection[str] = ()) -> list[Move]:
    """Return what changes hands; neurons that nobody held, or devices that are ``gone``, begin with new weights."""
    found = []
    for layer, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        held = {neuron: name for name, neurons in old.items() if name not in gone for neuron in neurons}
        for taker, neurons in new.items():
            own = set(old.get(taker, ())) if taker not in gone else set()
            changing: dict[str | None, list[int]] = {}
            for neuron in neurons:
                if neuron not in own:
                    changing.setdefault(held.get(neuron), []).append(neuron)
            found += [Move(layer, as_channels(each), giver, taker) for giver, each in changing.items()]
    return found


def _with(now: Arrangement, group: int, weights: Sequence[Mapping[str, float]], seed: int) -> Arrangement:
    """Return the next arrangement, in which the layers of a group are shared in proportion to weights."""
    layers = list(now.layers)
    for layer, wanted in zip(now.groups[group], weights, strict=True):
        draws = random.Random(derive(seed, "rearrangement", now.version + 1, layer))
        layers[layer] = _shared(layers[layer], wanted, now.sizes[layer], draws)
    return replace(now, layers=tuple(layers), version=now.version + 1)


def _shared(holders: Holders, weights: Mapping[str, float], size: int, draws: random.Random) -> dict[str, Channels]:
    """Return a layer's neurons by device: those with too many give some by chance, those with too few take them."""
    if not weights:
        return {}
    counts = dict(zip(weights, shares(list(weights.values()), size), strict=True))
    kept = {}
    for name, count in counts.items():
        held = holders.get(name, ())
        kept[name] = draws.sample(held, min(count, len(held)))
    free = sorted(set(range(size)) - {neuron for neurons in kept.values() for neuron in neurons})
    draws.shuffle(free)
    found = {}
    for name, count in counts.items():
        lacking = count - len(kept[name])
        found[name] = as_channels(kept[name] + free[:lacking])
        free = free[lacking:]
    return found
