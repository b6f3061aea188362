"""A container lives as long as its lease is renewed, and for ever without one."""

from __future__ import annotations

import threading
import time

from testbed.wire.token import LEASE, Lease


def test_a_lease_that_is_renewed_lasts_and_then_ends() -> None:
    over = threading.Event()
    lease = Lease({LEASE: "0.4"}, over.set)
    for _ in range(12):
        time.sleep(0.05)
        lease.renew()
    assert not over.is_set()
    assert over.wait(5.0)


def test_without_a_lease_there_is_nothing_to_renew() -> None:
    over = threading.Event()
    before = threading.active_count()
    Lease({}, over.set).renew()
    assert threading.active_count() == before
    assert not over.is_set()
