"""A device's way through timeslots, by the clock."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable

from testbed.device import Device
from testbed.kits.slots.timeslots import LayerAction, SlotSegment


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
            await _until(device, segment.begin(slot))
            if device.now() < segment.begin(slot + 1):
                yield segment, action
        await _until(device, segment.end)
        yield segment, None


async def _until(device: Device, instant: float) -> None:
    await device.sleep(max(0.0, instant - device.now()))
