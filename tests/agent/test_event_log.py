"""The log of a device's events: every line once and in order, whatever is compressed or dropped meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from testbed_agent.events import BLOCK, EventLog
from testbed_agent.http import Refused


def lines(log: EventLog, after: int = 0) -> list[bytes]:
    return b"".join(log.follow(after)).splitlines()


def filled(count: int, limit: int = 1 << 30) -> EventLog:
    log = EventLog(limit)
    for number in range(count):
        log.append(f"event {number} {'x' * 100}")
    return log


def test_lines_are_read_from_any_number() -> None:
    log = filled(2000)
    log.close()
    assert log.count == 2000
    for after in (0, 1, 250, 299, 300, 1000, 1700, 1999, 2000):
        found = lines(log, after)
        assert [int(line.split()[1]) for line in found] == list(range(after, 2000))


def test_follower_receives_later_lines() -> None:
    log = filled(10)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(log.follow(5)))
    reader.start()
    for number in range(10, 3000):
        log.append(f"event {number} {'x' * 100}")
    log.close()
    reader.join(5)
    assert [
        int(line.split()[1]) for line in b"".join(found).splitlines() if line
    ] == list(range(5, 3000))


def test_old_lines_are_compressed() -> None:
    log = filled(10_000)
    assert log._sealed_bytes + log._recent_bytes < 10_000 * 110 / 5
    assert log._recent_bytes <= 2 * BLOCK


def test_reader_too_far_behind_is_refused() -> None:
    log = filled(20_000, limit=20_000)
    with pytest.raises(Refused, match="event 0 was dropped"):
        log.follow(0)
    log.close()
    oldest = log.count - log._sealed_lines - len(log._recent)
    assert oldest > 0
    assert len(lines(log, oldest)) == log.count - oldest
    slow = log.follow(oldest)
    next(slow)
    log.reopen()
    for number in range(20_000):
        log.append(f"more {number} {'y' * 100}")
    with pytest.raises(Refused):
        list(slow)


def test_a_number_beyond_the_end_is_refused() -> None:
    with pytest.raises(Refused, match="event 4 does not exist: 3"):
        filled(3).follow(4)


def test_quiet_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed_agent.events.HEARTBEAT", 0.01)
    stream = filled(1).follow(0)
    assert next(stream).startswith(b"event 0")
    assert next(stream) == b"\n"


def test_a_log_is_closed_and_opened_again() -> None:
    log = filled(2)
    log.close()
    assert len(lines(log)) == 2
    log.reopen()
    log.append("more")
    log.close()
    assert len(lines(log, 2)) == 1


def test_lines_that_follow_each_other_closely_are_read_together() -> None:
    log, pieces = EventLog(1000), []
    reader = threading.Thread(target=lambda: pieces.extend(log.follow(0)))
    reader.start()
    for number in range(50):
        log.append(str(number))
        time.sleep(0.001)
    log.close()
    reader.join(5)
    assert b"".join(pieces).split() == [str(number).encode() for number in range(50)]
    assert len(pieces) < 25
