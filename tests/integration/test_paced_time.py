"""Paced time against the clock: four devices at once, on a host that is idle and on one with a core loaded."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tools.bench.pacing import CHARGES, TOLERANCE, load_one_core, pace


@pytest.mark.timed
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "loaded"])
def test_spans_take_what_they_are_charged_or_say_by_how_much_not(busy: bool) -> None:
    with load_one_core() if busy else contextlib.nullcontext():
        devices = pace(seconds=2.0)
    spans = [span for device in devices for span in device.spans]
    assert len(spans) > 4 * 2.0 / max(CHARGES)
    on_time = [span for span in spans if span.error <= TOLERANCE]
    # The other load of this machine is unknown: most spans are on time, and late ones are reported. One span in a
    # hundred may miss, as in the published figure: the kernel can preempt an agent between clock and report.
    assert len(on_time) > 0.8 * len(spans)
    assert np.percentile([span.unreported for span in spans], 99) <= TOLERANCE
    for device in devices:
        # The clock agrees with what the devices say of themselves, but for the first start and the last hand-over.
        assert device.wall == pytest.approx(
            sum(span.duration for span in device.spans), abs=0.03
        )
