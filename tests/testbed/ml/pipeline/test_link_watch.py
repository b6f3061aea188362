"""Tests of the link watch, which compares the arrival of ordinary messages with the measured rate of a link."""

import pytest

from testbed.ml.pipeline.measuring import SMALL_MESSAGE, LinkWatch, MeasuredLink
from testbed.wire.framing import wire_bytes

LATENCY = 0.04


def deviations(rates, measured=1e6, gap=0.2, size=5000):
    """Send a message for each rate of a changing link; return the messages at which the watch reports a deviation.

    ``measured`` is the measured rate, ``gap`` the seconds between messages, ``size`` their bytes on the wire.
    """
    # The latency was measured with a small message, whose transmission is no part of the propagation.
    propagation = LATENCY - 8 * wire_bytes(SMALL_MESSAGE) / measured
    watch = LinkWatch(MeasuredLink(measured, LATENCY))
    reported = []
    link_free = 0.0
    for number, rate in enumerate(rates):
        posted = gap * number
        # Messages queue for the link.
        link_free = max(posted, link_free) + 8 * size / rate
        if watch.deviates(size, posted, link_free + propagation):
            reported.append(number)
    return reported


# With a gap of 0.02 s messages of 0.04 s queue one behind the other.
@pytest.mark.parametrize("gap", [0.2, 0.02])
def test_unchanged_link_does_not_deviate(gap):
    assert not deviations([1e6] * 60, gap=gap)


@pytest.mark.parametrize("rate", [0.3e6, 5e6])
def test_changed_rate_is_reported_after_10_messages(rate):
    assert deviations([1e6] * 20 + [rate] * 20)[0] == 29


def test_change_before_first_message_is_reported_after_10_messages():
    assert deviations([0.3e6] * 12)[0] == 9


def test_single_slow_messages_are_not_reported():
    assert not deviations(([1e6] * 9 + [0.1e6]) * 5, gap=1.0)


def test_messages_too_short_to_measure_rate_are_ignored():
    assert not deviations([1e9] * 20 + [0.5e9] * 40, measured=1e9, size=400)


def test_constant_rate_above_measured_one_is_not_reported():
    # The link was shared while it was measured, so all later messages are faster.
    assert not deviations([2e6] * 60)
    assert deviations([2e6] * 20 + [10e6] * 20, size=50_000, gap=1.0)[0] == 29
