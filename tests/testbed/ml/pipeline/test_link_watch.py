"""A watch over a link: what is sent anyway shows whether it still does what was measured."""

import pytest

from testbed.ml.pipeline.measuring import SMALL, LinkWatch, MeasuredLink
from testbed.wire.framing import wire_bytes

LATENCY = 0.04


def deviations(rates, measured=1e6, gap=0.2, size=5000):
    """Send messages one after the other over a link whose rate changes; say at which of them it was noticed."""
    first = LATENCY - 8 * wire_bytes(SMALL) / measured
    watch = LinkWatch(MeasuredLink(measured, LATENCY))
    noticed, left = [], 0.0
    for number, rate in enumerate(rates):
        posted = gap * number
        left = max(posted, left) + 8 * size / rate
        if watch.deviates(size, posted, left + first):
            noticed.append(number)
    return noticed


@pytest.mark.parametrize("gap", [0.2, 0.02])
def test_an_unchanged_link_deviates_never(gap):
    """Also where messages queue one behind the other."""
    assert not deviations([1e6] * 60, gap=gap)


@pytest.mark.parametrize("rate", [0.3e6, 5e6])
def test_ten_messages_show_a_change(rate):
    assert deviations([1e6] * 20 + [rate] * 20)[0] == 29


def test_a_change_before_the_first_message_shows_too():
    assert deviations([0.3e6] * 12)[0] == 9


def test_one_slow_message_says_nothing():
    assert not deviations(([1e6] * 9 + [0.1e6]) * 5, gap=1.0)


def test_messages_too_short_to_tell_are_left_out():
    assert not deviations([1e9] * 20 + [0.5e9] * 40, measured=1e9, size=400)


def test_a_link_that_was_shared_while_it_was_measured_is_not_thought_better():
    assert not deviations([2e6] * 60)
    assert deviations([2e6] * 20 + [10e6] * 20, size=50_000, gap=1.0)[0] == 29
