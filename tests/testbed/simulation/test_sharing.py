"""Rates of those that share: fair, and none left unused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.simulation.sharing import Shared, SharedTransfer, max_min_fair_rates


def flow(cap: float, *uses: Shared) -> SharedTransfer:
    return SharedTransfer(1.0, cap, [(shared, 1.0) for shared in uses], lambda: None)


def test_rates_are_fair_and_leave_nothing_unused():
    up, down = Shared(10.0), Shared(6.0)
    slow, other, far = flow(2.0, up), flow(100.0, up), flow(100.0, up, down)
    rival = flow(100.0, down)
    rates = max_min_fair_rates([slow, other, far, rival], 0.0)
    assert rates == {slow: 2.0, far: 3.0, rival: 3.0, other: 5.0}


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(1, 1000), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.floats(1, 1000), st.sets(st.integers(0, 3), min_size=1)),
        min_size=1,
        max_size=8,
    ),
)
def test_no_rate_could_be_raised_without_another_s_loss(rates, wanted):
    shareds = [Shared(rate) for rate in rates]
    flows = [
        flow(
            cap,
            *(
                shareds[index % len(shareds)]
                for index in {i % len(shareds) for i in of}
            ),
        )
        for cap, of in wanted
    ]
    found = max_min_fair_rates(flows, 0.0)
    used = {
        shared: sum(found[each] for each in flows if (shared, 1.0) in each.uses)
        for shared in shareds
    }
    for shared in shareds:
        assert used[shared] <= shared.rate * (1 + 1e-9)
    for each in flows:
        full = [
            shared
            for shared, _ in each.uses
            if used[shared] >= shared.rate * (1 - 1e-9)
        ]
        greatest = [
            max(found[rival] for rival in flows if (shared, 1.0) in rival.uses)
            for shared in full
        ]
        assert found[each] == pytest.approx(each.cap) or any(
            found[each] >= most * (1 - 1e-9) for most in greatest
        )
