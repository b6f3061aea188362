"""A container lives as long as its lease is renewed, and for ever without one."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from testbed.wire import token
from testbed.wire.token import LEASE, Lease


def test_a_lease_that_is_renewed_lasts_and_then_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps, over = [threading.Semaphore(0), threading.Semaphore(0)], threading.Event()

    def sleep(_seconds: float) -> None:
        sleeps[0].release()
        sleeps[1].acquire()

    monkeypatch.setattr(token, "time", SimpleNamespace(sleep=sleep))
    lease = Lease({LEASE: "4"}, over.set)  # which is counted in four sleeps
    for number in range(12):
        assert sleeps[0].acquire(timeout=20)
        if number < 9:
            lease.renew()
        assert not over.is_set()
        sleeps[1].release()
    assert over.wait(20)


def test_without_a_lease_there_is_nothing_to_renew() -> None:
    over = threading.Event()
    before = threading.active_count()
    Lease({}, over.set).renew()
    assert threading.active_count() == before
    assert not over.is_set()
