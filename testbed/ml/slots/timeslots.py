"""EdgePipe's equation (2): the work of each layer group in every timeslot, the staleness of weights, the slot clock.

A group is a number of adjacent layers that the same devices hold. All groups have a common rhythm of ``period`` slots a
batch. Batch b is forwarded through layer l in slot ``forward[l]`` + b * period, and sent backward in slot
``backward[l]`` + b * period. In other slots a device stalls. Slots, layers and batches are counted from 0; layer 0 is
the input layer, which has no weights.
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
"""Default seconds of a timeslot beyond computation and transmission: the 100 ms of EdgePipe's Section VI."""


class LayerAction(NamedTuple):
    """One slot's work: a batch through one layer."""

    kind: Literal["forward", "backward"]
    layer: int
    batch: int

    def __str__(self) -> str:
        return f"{Action(self.kind, self.batch)}.{self.layer}"


class _FirstAction(NamedTuple):
    """The work of a layer on batch 0, with the slot of this work."""

    kind: Literal["forward", "backward"]
    layer: int
    slot: int


Rhythm = tuple[tuple[_FirstAction, ...], ...]
"""For each slot of a period, the actions that a group repeats in this slot, with the next batch in every period."""


@dataclass(frozen=True)
class Timetable:
    """The slots of each layer's work on each batch."""

    groups: tuple[range, ...]
    """Adjacent layers of each group."""
    period: int
    """Slots from one batch to the next."""
    forward: tuple[int, ...]
    """By layer, the slot in which batch 0 is forwarded."""
    backward: tuple[int | None, ...]
    """By layer, the slot in which batch 0 is sent backward; None for the input layer, and for all layers in tests."""
    micro_batches: int = 1
    """Number of micro-batches of each batch, one a slot. Numbers of batches below count micro-batches."""

    def slot_count(self, batches: int) -> int:
        """Return the number of slots from the first forward to the last backward of one or more batches.

        >>> make_timetable([range(0, 2), range(2, 4), range(4, 6)]).slot_count(2)
        15
        """
        backwards = [slot for slot in self.backward if slot is not None]
        # Tests have no backward: their last slot forwards through the last layer.
        last = max(backwards, default=len(self.forward) - 1)
        whole_batches, further_micro_batches = divmod(batches - 1, self.micro_batches)
        return last + 1 + self.period * whole_batches + further_micro_batches

    def step_count(self, slots: int) -> int:
        """Return the number of whole batches, with all their micro-batches, complete after ``slots`` slots."""
        slots_after_first = slots - self.slot_count(self.micro_batches)
        return max(0, slots_after_first // self.period + 1)

    def action(self, group: int, slot: int) -> LayerAction | None:
        """Return the action of a group's device in a slot; None for a stall."""
        rhythm = self._group_rhythms[group]
        for kind, layer, first in rhythm[slot % self.period]:
            # Before its first batch a group stalls in this slot of the period.
            if slot >= first:
                whole_batch, part = divmod(slot - first, self.period)
                batch = whole_batch * self.micro_batches + part
                return LayerAction(kind, layer, batch)
        return None

    @cached_property
    def _group_rhythms(self) -> tuple[Rhythm, ...]:
        """The rhythm of each group, cached, since `action` needs it in every slot of a run."""
        return tuple(map(self._make_rhythm, self.groups))

    def _make_rhythm(self, group: range) -> Rhythm:
        rhythm: list[list[_FirstAction]] = []
        for _ in range(self.period):
            rhythm.append([])
        for layer in group:
            first_actions = [_FirstAction("forward", layer, self.forward[layer])]
            backward_slot = self.backward[layer]
            if backward_slot is not None:
                first_actions.append(_FirstAction("backward", layer, backward_slot))
            # Micro-batches follow each other, one a slot.
            for part in range(self.micro_batches):
                for first in first_actions:
                    slot = (first.slot + part) % self.period
                    rhythm[slot].append(first)
        return tuple(map(tuple, rhythm))

    def actions(self, group: int, batches: int) -> Iterator[LayerAction | None]:
        """Yield a group's action in each slot until all groups have finished ``batches`` batches; None for a stall."""
        for slot in range(self.slot_count(batches)):
            action = self.action(group, slot)
            # A group that has finished its last batch stalls until the other groups have.
            is_beyond_end = action is not None and action.batch >= batches
            yield None if is_beyond_end else action

    def staleness(self, layer: int) -> int:
        """Return the age of a layer's weights in a forward: 1 if the weights include the update of the previous batch.

        Equation (3): P - w + 1 for group w of P, counted from 1. The input layer, without weights, has 0.

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

    Every layer is forwarded in the slot after the previous layer. A group's backward begins after the backward of the
    next group; for groups of unequal length, in the first slots after it without a forward of the group. If not
    ``pipelined``, a batch begins after the previous one is complete (the paper's Model).

    >>> print(draw_timetable(make_timetable([range(0, 2), range(2, 3)]), batches=2))
    layers 0-1  F0.0 F0.1 .    F1.0 F1.1 B0.1 .    .    B1.1
    layers 2-2  .    .    F0.2 B0.2 .    F1.2 B1.2 .    .
    """
    layers = groups[-1].stop
    period = naive_slots(layers, 1)
    if pipelined:
        # Equation (2): a batch needs as many slots as the group with the most forwards and backwards of one batch.
        busy_slots = [len(group) + len(learning_layers(group)) for group in groups]
        period = max(busy_slots)
    backward: list[int | None] = [None] * layers
    # Batch 0 has passed the last layer forward in slot `layers` - 1.
    next_slot = layers
    for group in reversed(groups):
        backward_layers = learning_layers(group)
        forward_slots = {layer % period for layer in group}
        # With groups of unequal length, the next slots may belong to forwards of later batches.
        while forward_slots & _slots_of_period(next_slot, len(backward_layers), period):
            next_slot += 1
        for layer in reversed(backward_layers):
            backward[layer] = next_slot
            next_slot += 1
    forward = tuple(range(layers))
    return Timetable(tuple(groups), period, forward, tuple(backward))


def _slots_of_period(first: int, count: int, period: int) -> set[int]:
    """Return the positions within a period of ``count`` consecutive slots from slot ``first`` on."""
    return {(first + offset) % period for offset in range(count)}


@dataclass(frozen=True)
class SlotSegment:
    """Consecutive batches from an empty pipeline to an empty one: some training steps, or the following tests."""

    is_test: bool
    start: float
    """Seconds at which the first slot begins."""
    slot: float
    """Seconds of each slot."""
    table: Timetable
    batches: range
    """Training batches, counted through all segments, or test batches from 0 on."""
    first_number: int
    """Number of the segment's first batch among all batches of training and tests."""
    trained_steps: int
    """Completed training steps at the end of the segment."""

    @property
    def end(self) -> float:
        """End of the last slot in seconds."""
        slots = self.table.slot_count(len(self.batches))
        return self.start_of(slots)

    def start_of(self, slot: int) -> float:
        """Return the start of a slot, numbered from 0, in seconds."""
        return self.start + slot * self.slot

    def next_start(self, now: float) -> float:
        """Return the start of the slot after the current one, in seconds."""
        # A device wakes exactly at the start of a slot; without the margin, rounding could put it in the slot before.
        elapsed_slots = (now - self.start) / self.slot
        current = math.floor(elapsed_slots + 1e-9)
        return self.start_of(current + 1)

    def batch_number(self, batch: int) -> int:
        """Return the number of a batch among all batches of training and tests."""
        return self.first_number + batch - self.batches.start

    def scheduled_work(self, group: int) -> Iterator[tuple[int, LayerAction]]:
        """Yield (slot, action) for each slot of the segment, numbered from 0, in which a group's devices have work."""
        actions = self.table.actions(group, len(self.batches))
        for slot, action in enumerate(actions):
            if action is not None:
                # The timetable counts batches from 0 in each segment.
                batch = self.batches.start + action.batch
                yield slot, action._replace(batch=batch)


def make_segments(
    table: Timetable,
    slot: float,
    steps: int,
    test_slot: float,
    tests: int,
    every: int | None = None,
    start_time: float = 0.0,
) -> Iterator[SlotSegment]:
    """Yield a training segment and a test segment by turns, until ``steps`` steps are trained.

    A training segment has ``every`` steps, by default all steps; the last segment may have fewer. ``slot`` and
    ``test_slot`` are the seconds of a slot in training and in tests, and the first slot begins at the instant
    ``start_time``, in seconds. Each evaluation has ``tests`` test batches. The pipeline drains before tests and fills
    again after them.

    >>> table = make_timetable([range(0, 2), range(2, 3)])
    >>> for segment in make_segments(table, slot=0.5, steps=2, test_slot=1.0, tests=1):
    ...     print(segment.is_test, segment.start, segment.end)
    False 0.0 4.5
    True 4.5 7.5
    """
    test_table = _forward_only(table)
    start = start_time
    number = 0
    interval = every or steps
    for first_step in range(0, steps, interval):
        trained_steps = min(first_step + interval, steps)
        first_batch = first_step * table.micro_batches
        batches = range(first_batch, trained_steps * table.micro_batches)
        training = SlotSegment(
            is_test=False,
            start=start,
            slot=slot,
            table=table,
            batches=batches,
            first_number=number,
            trained_steps=trained_steps,
        )
        yield training
        start = training.end
        number += len(batches)
        testing = SlotSegment(
            is_test=True,
            start=start,
            slot=test_slot,
            table=test_table,
            batches=range(tests),
            first_number=number,
            trained_steps=trained_steps,
        )
        yield testing
        start = testing.end
        number += tests


async def work_slots(
    device: Device, group: int, segments: Iterable[SlotSegment]
) -> AsyncGenerator[tuple[SlotSegment, LayerAction | None], None]:
    """Sleep until each slot with work begins, and yield (segment, action); yield (segment, None) when a segment ends.

    Past slots are skipped: the device was off or suspended then.
    """
    for segment in segments:
        if device.now() >= segment.end:
            continue
        for slot, action in segment.scheduled_work(group):
            await _sleep_until(device, segment.start_of(slot))
            # A device that wakes too late skips the slot: the receivers of its cast have begun their next slots.
            if device.now() < segment.start_of(slot + 1):
                yield segment, action
        await _sleep_until(device, segment.end)
        yield segment, None


async def _sleep_until(device: Device, instant: float) -> None:
    seconds = max(0.0, instant - device.now())
    await device.sleep(seconds)


def _forward_only(table: Timetable) -> Timetable:
    """Return the timetable of tests: the same layers and forwards, without backwards."""
    period = max(map(len, table.groups))
    no_backward = (None,) * len(table.forward)
    return Timetable(table.groups, period, table.forward, no_backward)


def fill_and_drain(groups: Sequence[range], micro_batches: int) -> Timetable:
    """Return GPipe's timetable of groups of one layer each.

    All micro-batches of a batch go forward, then all go backward.

    >>> fill_and_drain([range(0, 1), range(1, 2), range(2, 3)], micro_batches=2).backward
    (None, 5, 4)
    """
    layers = groups[-1].stop
    # The slot after the last micro-batch has passed the last layer.
    turn = layers - 1 + micro_batches
    backward: list[int | None] = [None]
    for layer in range(1, layers):
        backward.append(turn + layers - 1 - layer)
    # All forwards take `turn` slots, and all backwards one less, because the input layer has none.
    period = 2 * turn - 1
    forward = tuple(range(layers))
    return Timetable(
        groups=tuple(groups),
        period=period,
        forward=forward,
        backward=tuple(backward),
        micro_batches=micro_batches,
    )


def learning_layers(group: range) -> range:
    """Return a group's layers with weights: all but the input layer.

    >>> learning_layers(range(0, 2))
    range(1, 2)
    """
    return range(max(1, group.start), group.stop)


def naive_slots(layers: int, batches: int) -> int:
    """Return the number of slots for ``batches`` batches without a pipeline, one batch after the other.

    A batch takes a slot in each layer forward, and in each layer but the input layer backward.
    """
    return (2 * layers - 1) * batches


def draw_timetable(timetable: Timetable, batches: int = 3, widest: int = 24) -> str:
    """Draw the slots of the first batches, at most ``widest`` slots, one line per group.

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
