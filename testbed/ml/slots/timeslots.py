"""Equation (2): each layer group's work in every timeslot, the staleness of its weights, and the slot clock.

All groups have a common rhythm of ``period`` slots a batch. Batch b is forwarded through layer l in slot ``forward[l]``
+ b * period, and sent backward in slot ``backward[l]`` + b * period. In other slots a device stalls.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

from testbed.device import Device
from testbed.ml.schedule import Action

TIMESLOT_MARGIN = 0.1
"""Seconds; the paper's."""


class LayerAction(NamedTuple):
    """One slot's work: a batch through one layer."""

    kind: Literal["forward", "backward"]
    layer: int
    batch: int

    def __str__(self) -> str:
        return f"{Action(self.kind, self.batch)}.{self.layer}"


class _FirstAction(NamedTuple):
    """The work of a layer on batch 0, and the slot of this work."""

    kind: Literal["forward", "backward"]
    layer: int
    slot: int


@dataclass(frozen=True)
class Timetable:
    """The slots of each layer's work on each batch."""

    groups: tuple[range, ...]
    period: int
    """Slots from one batch to the next."""
    forward: tuple[int, ...]
    """By layer, the slot of batch 0."""
    backward: tuple[int | None, ...]
    """The same for the backward; None for the input layer, which has no weights."""
    micro: int = 1
    """Micro-batches of each batch, one a slot. The methods below count these as batches."""

    def slot_count(self, batches: int) -> int:
        """Return the number of slots from the first forward to the last backward of one or more batches.

        >>> make_timetable([range(0, 2), range(2, 4), range(4, 6)]).slot_count(2)
        15
        """
        backwards = [slot for slot in self.backward if slot is not None]
        # Tests have no backward: their last slot forwards through the last layer.
        last = max(backwards, default=len(self.forward) - 1)
        whole, more = divmod(batches - 1, self.micro)
        return last + 1 + self.period * whole + more

    def step_count(self, slots: int) -> int:
        """Return the number of complete batches, with all micro-batches, finished within a number of slots."""
        return max(0, (slots - self.slot_count(self.micro)) // self.period + 1)

    def action(self, group: int, slot: int) -> LayerAction | None:
        """Return the action of a group's device in a slot; None for a stall."""
        for kind, layer, first in self._group_rhythms[group][slot % self.period]:
            # Before its first batch a group stalls in this slot of the period.
            if slot >= first:
                batch, part = divmod(slot - first, self.period)
                return LayerAction(kind, layer, batch * self.micro + part)
        return None

    @cached_property
    def _group_rhythms(self) -> tuple[tuple[tuple[_FirstAction, ...], ...], ...]:
        """By group and slot of a period: the possible actions. Computed once, since every slot of a run asks."""
        return tuple(map(self._group_rhythm, self.groups))

    def _group_rhythm(self, group: range) -> tuple[tuple[_FirstAction, ...], ...]:
        """Return the possible actions of each slot of a period, with their slots for batch 0."""
        rhythm: list[list[_FirstAction]] = [[] for _ in range(self.period)]
        for layer in group:
            first_actions = [_FirstAction("forward", layer, self.forward[layer])]
            backward_slot = self.backward[layer]
            if backward_slot is not None:
                first_actions.append(_FirstAction("backward", layer, backward_slot))
            # Micro-batches follow each other, one a slot.
            for part in range(self.micro):
                for first in first_actions:
                    rhythm[(first.slot + part) % self.period].append(first)
        return tuple(map(tuple, rhythm))

    def actions(self, group: int, batches: int) -> Iterator[LayerAction | None]:
        """Yield a group's action in each slot until all groups have finished a number of batches."""
        for slot in range(self.slot_count(batches)):
            action = self.action(group, slot)
            # A group that has finished its last batch stalls until the other groups have.
            is_beyond_end = action is not None and action.batch >= batches
            yield None if is_beyond_end else action

    def staleness(self, layer: int) -> int:
        """Return the number of updates a layer's weights lag in a forward: 1 if they include the previous batch.

        Equation (3): P - w + 1 for group w of P, counted from 1. The input layer has 0.

        >>> table = make_timetable([range(0, 2), range(2, 4), range(4, 6)])
        >>> [table.staleness(layer) for layer in range(6)]
        [0, 3, 2, 2, 1, 1]
        """
        backward = self.backward[layer]
        if backward is None:
            return 0
        return (backward - self.forward[layer]) // self.period + 1


def make_timetable(groups: Sequence[range], pipelined: bool = True) -> Timetable:
    """Return the timetable of groups of adjacent layers, from the input layer on.

    Every layer is forwarded in the slot after the previous layer. A group goes backward once the next group is done or,
    for groups of unequal length, in the first later slots without a forward of its own. If not ``pipelined``, a batch
    begins after the previous one is complete (the paper's Model).

    >>> print(draw_timetable(make_timetable([range(0, 2), range(2, 3)]), batches=2))
    layers 0-1  F0.0 F0.1 .    F1.0 F1.1 B0.1 .    .    B1.1
    layers 2-2  .    .    F0.2 B0.2 .    F1.2 B1.2 .    .
    """
    layers = groups[-1].stop
    # Equation (2): the rhythm is that of the group with the most forwards and backwards of one batch.
    busiest = max(len(group) + len(learning_layers(group)) for group in groups)
    period = busiest if pipelined else naive_slots(layers, 1)
    backward: list[int | None] = [None] * layers
    next_slot = layers
    for group in reversed(groups):
        learning = learning_layers(group)
        forwarding = {layer % period for layer in group}
        # With groups of unequal length, the next slots may belong to forwards of later batches.
        while forwarding & _slots_of_period(next_slot, len(learning), period):
            next_slot += 1
        for layer in reversed(learning):
            backward[layer] = next_slot
            next_slot += 1
    return Timetable(tuple(groups), period, tuple(range(layers)), tuple(backward))


def _slots_of_period(first: int, count: int, period: int) -> set[int]:
    """Return the places within a period of a number of consecutive slots."""
    return {(first + offset) % period for offset in range(count)}


@dataclass(frozen=True)
class SlotSegment:
    """Consecutive batches from an empty pipeline to an empty one: some training steps, or the following tests."""

    is_test: bool
    start: float
    """Seconds at which its first slot begins."""
    slot: float
    """Seconds of each."""
    table: Timetable
    batches: range
    """Steps, or test batches from 0 on."""
    first_number: int
    """Number of its first batch among all batches of training and tests."""
    trained_steps: int
    """Completed training steps at its end."""

    @property
    def end(self) -> float:
        """End of the last slot in seconds."""
        return self.start_of(self.table.slot_count(len(self.batches)))

    def start_of(self, slot: int) -> float:
        """Return the start of a slot, numbered from 0, in seconds."""
        return self.start + slot * self.slot

    def next_start(self, now: float) -> float:
        """Return the start of the slot after the current one, in seconds."""
        # A device wakes exactly at the start of a slot; without the margin, rounding could put it in the slot before.
        current = math.floor((now - self.start) / self.slot + 1e-9)
        return self.start_of(current + 1)

    def batch_number(self, batch: int) -> int:
        """Return the number of a batch among all batches of training and tests."""
        return self.first_number + batch - self.batches.start

    def scheduled_work(self, group: int) -> Iterator[tuple[int, LayerAction]]:
        """Yield the slots, numbered from 0, with work for a group's device, and the batch."""
        for slot, action in enumerate(self.table.actions(group, len(self.batches))):
            if action is not None:
                kind, layer, batch = action
                yield slot, LayerAction(kind, layer, self.batches.start + batch)


def make_segments(
    table: Timetable,
    slot: float,
    steps: int,
    test_slot: float,
    tests: int,
    every: int | None = None,
    first: float = 0.0,
) -> Iterator[SlotSegment]:
    """Yield training segments, with test segments after each ``every`` steps (None: at the end only) and at the end.

    The pipeline drains before tests and fills again after them. Slots are in seconds, as is the instant ``first`` of
    the first slot.

    >>> table = make_timetable([range(0, 2), range(2, 3)])
    >>> for segment in make_segments(table, slot=0.5, steps=2, test_slot=1.0, tests=1):
    ...     print(segment.is_test, segment.start, segment.end)
    False 0.0 4.5
    True 4.5 7.5
    """
    test_table = _forward_only(table)
    start, number = first, 0
    interval = every or steps
    for begin in range(0, steps, interval):
        trained = min(begin + interval, steps)
        batches = range(begin * table.micro, trained * table.micro)
        training = SlotSegment(False, start, slot, table, batches, number, trained)
        yield training
        start = training.end
        number += len(batches)
        testing = SlotSegment(
            True, start, test_slot, test_table, range(tests), number, trained
        )
        yield testing
        start = testing.end
        number += tests


async def work_slots(
    device: Device, group: int, segments: Iterable[SlotSegment]
) -> AsyncGenerator[tuple[SlotSegment, LayerAction | None], None]:
    """Yield the work of each slot as it begins, and None as each segment ends.

    Past slots are skipped: the device was off or suspended.
    """
    for segment in segments:
        if device.now() >= segment.end:
            continue
        for slot, action in segment.scheduled_work(group):
            await device.sleep(max(0.0, segment.start_of(slot) - device.now()))
            # A device that slept too long leaves the slot out: the others no longer wait for its cast.
            if device.now() < segment.start_of(slot + 1):
                yield segment, action
        await device.sleep(max(0.0, segment.end - device.now()))
        yield segment, None


def _forward_only(table: Timetable) -> Timetable:
    period = max(len(group) for group in table.groups)
    return Timetable(table.groups, period, table.forward, (None,) * len(table.forward))


def fill_and_drain(groups: Sequence[range], micro: int) -> Timetable:
    """Return GPipe's timetable of groups of one layer each.

    All micro-batches of a batch go forward, then all go backward.

    >>> fill_and_drain([range(0, 1), range(1, 2), range(2, 3)], micro=2).backward
    (None, 5, 4)
    """
    layers = groups[-1].stop
    turn = layers - 1 + micro
    backward: list[int | None] = [None]
    for layer in range(1, layers):
        backward.append(turn + layers - 1 - layer)
    period = 2 * layers + 2 * micro - 3
    return Timetable(
        tuple(groups), period, tuple(range(layers)), tuple(backward), micro
    )


def learning_layers(group: range) -> range:
    """Return a group's layers with weights: all but the input layer.

    >>> learning_layers(range(0, 2))
    range(1, 2)
    """
    return range(max(1, group.start), group.stop)


def naive_slots(layers: int, batches: int) -> int:
    """Return the slots of one device, and of any division without a pipeline: one batch after the other.

    A batch passes all layers forward and all but the input layer backward.
    """
    return (2 * layers - 1) * batches


def draw_timetable(timetable: Timetable, batches: int = 3, widest: int = 24) -> str:
    """Draw the first slots, one line per group.

    ``F0.2`` is batch 0 forward through layer 2, ``B0.2`` the same batch backward, and ``.`` a stall.
    """
    lines = []
    for group, layers in enumerate(timetable.groups):
        cells = []
        for action in islice(timetable.actions(group, batches), widest):
            text = "." if action is None else str(action)
            cells.append(f"{text:<4}")
        row = " ".join(cells).rstrip()
        lines.append(f"layers {layers.start}-{layers.stop - 1}  {row}")
    return "\n".join(lines)
