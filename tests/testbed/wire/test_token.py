"""The lease that limits the life of a container."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from testbed.wire import token
from testbed.wire.token import LEASE, Lease


def test_lease_ends_after_last_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_started, sleep_may_end = threading.Semaphore(0), threading.Semaphore(0)
    ended = threading.Event()

    def sleep(_seconds: float) -> None:
        sleep_started.release()
        sleep_may_end.acquire()

    monkeypatch.setattr(token, "time", SimpleNamespace(sleep=sleep))
    # A lease is counted down in four sleeps, so three sleeps may follow the last renewal.
    lease = Lease({LEASE: "4"}, ended.set)
    for number in range(12):
        assert sleep_started.acquire(timeout=20)
        if number < 9:
            lease.renew()
        assert not ended.is_set()
        sleep_may_end.release()
    assert ended.wait(20)


def test_container_without_lease_runs_without_limit() -> None:
    ended = threading.Event()
    threads_before = threading.active_count()
    Lease({}, ended.set).renew()
    # No thread counts down.
    assert threading.active_count() == threads_before
    assert not ended.is_set()
