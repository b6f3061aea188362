"""Equation (2): what each group of layers does in every timeslot, how stale its weights are, and the clock of slots.

All groups work in one rhythm of ``period`` slots a batch. Batch b is forwarded through layer l in slot ``forward[l]`` +
b * period, and sent backward in slot ``backward[l]`` + b * period. In other slots a device stalls.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from testbed.device import Device
from testbed.ml.schedule import Action

MARGIN = 0.1
"""Seconds; the paper's."""


class LayerAction(NamedTuple):
    """One slot's work: a batch through one layer."""

    kind: Literal["forward", "backward"]
    layer: int
    batch: int

    def __str__(self) -> str:
        return f"{Action(self.kind, self.batch)}.{self.layer}"


@dataclass(frozen=True)
class Timetable:
    """When each layer works on each batch."""

    groups: tuple[range, ...]
    period: int
    """Slots from one batch to the next."""
    forward: tuple[int, ...]
    """By layer, the slot of batch 0."""
    backward: tuple[int | None, ...]
    """The same; None for the input layer, which has nothing to learn."""
    micro: int = 1
    """Micro-batches of each batch, one a slot. What is counted in batches below are these."""

    def slots(self, batches: int) -> int:
        """Return how many slots pass from the first forward to the last backward of one or more batches."""
        ends = [slot for slot in self.backward if slot is not None]
        whole, more = divmod(batches - 1, self.micro)
        return max(ends, default=len(self.forward) - 1) + 1 + self.period * whole + more

    def steps(self, slots: int) -> int:
        """Return how many whole batches, of all their micro-batches, are through within a number of slots."""
        return max(0, (slots - self.slots(self.micro)) // self.period + 1)

    def action(self, group: int, slot: int) -> LayerAction | None:
        """Return what a device of a group does in a slot; None: it stalls."""
        for kind, layer, first in self._rhythms[group][slot % self.period]:
            if slot >= first:
                batch, part = divmod(slot - first, self.period)
                return LayerAction(kind, layer, batch * self.micro + part)
        return None

    @cached_property
    def _rhythms(self) -> tuple[tuple[tuple[tuple[Literal["forward", "backward"], int, int], ...], ...], ...]:
        """By group and slot of a period: what its devices may do then, with which layer, and the slot of batch 0."""
        found = []
        for group in self.groups:
            rhythm: list[list[tuple[Literal["forward", "backward"], int, int]]] = [[] for _ in range(self.period)]
            for layer in group:
                for part in range(self.micro):
                    rhythm[(self.forward[layer] + part) % self.period].append(("forward", layer, self.forward[layer]))
                    if (first := self.backward[layer]) is not None:
                        rhythm[(first + part) % self.period].append(("backward", layer, first))
            found.append(tuple(map(tuple, rhythm)))
        return tuple(found)

    def actions(self, group: int, batches: int) -> Iterator[LayerAction | None]:
        """Yield what a device of a group does, slot by slot, until all have done with that number of batches."""
        for slot in range(self.slots(batches)):
            action = self.action(group, slot)
            yield None if action is not None and action.batch >= batches else action

    def staleness(self, layer: int) -> int:
        """Return by how many updates a layer's weights lag in a forward: 1 where the batch before is in them.

        Equation (3): P - w + 1 for group w of P, counted from 1. 0 for the input layer.
        """
        backward = self.backward[layer]
        return 0 if backward is None else (backward - self.forward[layer]) // self.period + 1


def timetable(groups: Sequence[range], pipelined: bool = True) -> Timetable:
    """Return the timetable of groups of adjacent layers, from the input layer on.

    Every layer is forwarded in the slot after the layer before. A group goes backward as soon as the group behind it is
    done, or, where groups are of unequal length, in the first slots after that in which it is never forwarding. Not
    ``pipelined``, a batch begins when the one before it is through (the paper's Model).
    """
    layers = groups[-1].stop
    period = max(len(group) + len(learning(group)) for group in groups) if pipelined else naive_slots(layers, 1)
    backward: list[int | None] = [None] * layers
    free = layers
    for group in reversed(groups):
        backwards = learning(group)
        forwarding = {layer % period for layer in group}
        while forwarding & {(free + offset) % period for offset in range(len(backwards))}:
            free += 1
        for layer in reversed(backwards):
            backward[layer] = free
            free += 1
    return Timetable(tuple(groups), period, tuple(range(layers)), tuple(backward))


@dataclass(frozen=True)
class SlotSegment:
    """Batches in a row, from an empty pipeline to an empty one: some steps of training, or the tests after them."""

    tests: bool
    start: float
    """Seconds at which its first slot begins."""
    slot: float
    """Seconds of each."""
    table: Timetable
    batches: range
    """Steps, or test batches from 0 on."""
    first: int
    """Number of its first batch among all that are fed, those of tests included."""
    trained: int
    """Steps that are done at its end."""

    @property
    def end(self) -> float:
        """Seconds at which its last slot ends."""
        return self.begin(self.table.slots(len(self.batches)))

    def begin(self, slot: int) -> float:
        """Return the seconds at which one of its slots, from 0, begins."""
        return self.start + slot * self.slot

    def next(self, now: float) -> float:
        """Return the seconds at which the slot after the present one begins."""
        return self.begin(math.floor((now - self.start) / self.slot + 1e-9) + 1)

    def number(self, batch: int) -> int:
        """Return the number of one of its batches among all that are fed."""
        return self.first + batch - self.batches.start

    def work(self, group: int) -> Iterator[tuple[int, LayerAction]]:
        """Yield its slots, from 0, in which a device of a group has work, and that with which of the batches."""
        for slot, action in enumerate(self.table.actions(group, len(self.batches))):
            if action is not None:
                kind, layer, batch = action
                yield slot, LayerAction(kind, layer, self.batches.start + batch)


def segments(
    table: Timetable,
    slot: float,
    steps: int,
    test_slot: float,
    tests: int,
    every: int | None = None,
    first: float = 0.0,
) -> Iterator[SlotSegment]:
    """Yield training, and the test batches after each ``every`` steps (None: after all) and after the last step.

    The pipeline drains before tests and fills again after them. Slots are in seconds, as is the instant at which the
    ``first`` begins.
    """
    start, number, testing = first, 0, _forward_only(table)
    for begin in range(0, steps, every or steps):
        end = min(begin + (every or steps), steps)
        trained = range(begin * table.micro, end * table.micro)
        for is_test, length, rhythm, batches in (
            (False, slot, table, trained),
            (True, test_slot, testing, range(tests)),
        ):
            segment = SlotSegment(is_test, start, length, rhythm, batches, number, end)
            yield segment
            start, number = segment.end, number + len(batches)


async def slots(
    device: Device, group: int, segments: Iterable[SlotSegment]
) -> AsyncGenerator[tuple[SlotSegment, LayerAction | None], None]:
    """Yield the work of each slot as it begins, and None as each segment ends.

    Slots that are over are left out: the device was off, or stood still.
    """
    for segment in segments:
        if device.now() >= segment.end:
            continue
        for slot, action in segment.work(group):
            await device.sleep(max(0.0, segment.begin(slot) - device.now()))
            if device.now() < segment.begin(slot + 1):
                yield segment, action
        await device.sleep(max(0.0, segment.end - device.now()))
        yield segment, None


def _forward_only(table: Timetable) -> Timetable:
    period = max(len(group) for group in table.groups)
    return Timetable(table.groups, period, table.forward, (None,) * len(table.forward))


def fill_and_drain(groups: Sequence[range], micro: int) -> Timetable:
    """Return GPipe's timetable of groups of one layer each: all micro-batches of a batch forward, then all backward."""
    layers = groups[-1].stop
    turn = layers - 1 + micro
    backward = (None, *(turn + layers - 1 - layer for layer in range(1, layers)))
    return Timetable(tuple(groups), 2 * layers + 2 * micro - 3, tuple(range(layers)), backward, micro)


def learning(group: range) -> range:
    """Return the layers of a group that have weights: all but the input layer."""
    return range(max(1, group.start), group.stop)


def naive_slots(layers: int, batches: int) -> int:
    """Return the slots of one device, and of any division without a pipeline: one batch after the other."""
    return (2 * layers - 1) * batches


def draw(timetable: Timetable, batches: int = 3, widest: int = 24) -> str:
    """Draw the first slots, one line a group: ``F0.2`` is batch 0 through layer 2, ``B0.2`` back, ``.`` stalls"""
    lines = []
    for group, layers in enumerate(timetable.groups):
        cells = [str(action or ".") for action in timetable.actions(group, batches)][:widest]
        lines.append(f"layers {layers.start}-{layers.stop - 1}  " + " ".join(f"{cell:<4}" for cell in cells).rstrip())
    return "\n".join(lines)
