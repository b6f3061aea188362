"""Max-min fair rates of concurrent transmissions."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.simulation.sharing import Shared, SharedTransfer, max_min_fair_rates

ROUNDING = 1e-9
"""Relative tolerance of sums of floats."""


def make_transfer(cap: float, *media: Shared) -> SharedTransfer:
    uses = [(shared, 1.0) for shared in media]
    return SharedTransfer(1.0, cap, uses, lambda: None)


def test_rates_are_fair_and_use_full_capacity():
    up, down = Shared(10.0), Shared(6.0)
    slow = make_transfer(2.0, up)
    through_both = make_transfer(100.0, up, down)
    up_only = make_transfer(100.0, up)
    down_only = make_transfer(100.0, down)
    rates = max_min_fair_rates([slow, up_only, through_both, down_only], 0.0)
    # Two share the downlink of 6; the uplink of 10 has 10 - 2 - 3 = 5 left.
    assert rates == {slow: 2.0, through_both: 3.0, down_only: 3.0, up_only: 5.0}


def rates_on(shared, rates):
    """Return the rates of all transfers on a medium."""
    return [rate for transfer, rate in rates.items() if is_on(transfer, shared)]


def is_on(transfer, shared):
    return (shared, 1.0) in transfer.uses


def is_limited(transfer, rates):
    """Return whether a transfer is at its cap, or has the greatest rate of a full medium."""
    rate = rates[transfer]
    if rate == pytest.approx(transfer.cap):
        return True
    for shared, _ in transfer.uses:
        is_full = sum(rates_on(shared, rates)) >= shared.rate * (1 - ROUNDING)
        if is_full and rate >= max(rates_on(shared, rates)) * (1 - ROUNDING):
            return True
    return False


# The definition of max-min fairness: no rate can be raised without lowering one that is not greater.
@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.floats(1, 1000), st.sets(st.integers(0, 3), min_size=1)),
        min_size=1,
        max_size=8,
    ),
)
def test_rate_cannot_rise_without_lowering_smaller_rate(capacities, requests):
    media = [Shared(capacity) for capacity in capacities]
    transfers = []
    for cap, numbers in requests:
        indices = {number % len(media) for number in numbers}
        transfers.append(make_transfer(cap, *(media[index] for index in indices)))
    rates = max_min_fair_rates(transfers, 0.0)
    for shared in media:
        assert sum(rates_on(shared, rates)) <= shared.rate * (1 + ROUNDING)
    for transfer in transfers:
        assert is_limited(transfer, rates)
