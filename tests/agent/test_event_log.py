"""The event log of a device: readers get each line once and in order, in spite of compression and dropped lines."""

from __future__ import annotations

import threading
import time

import pytest

from testbed_agent.events import BLOCK_BYTES, EventLog
from testbed_agent.http import Refused

UNLIMITED = 1 << 30


def read_lines(log: EventLog, after: int = 0) -> list[bytes]:
    return b"".join(log.follow(after)).splitlines()


def append_events(log: EventLog, numbers: range) -> None:
    """Append lines of about 110 bytes."""
    for number in numbers:
        log.append(f"event {number} {'x' * 100}")


def filled_log(count: int, limit: int = UNLIMITED) -> EventLog:
    log = EventLog(limit)
    append_events(log, range(count))
    return log


def event_numbers(lines: list[bytes]) -> list[int]:
    return [int(line.split()[1]) for line in lines]


@pytest.mark.parametrize("after", [0, 1, 250, 299, 300, 1000, 1700, 1999, 2000])
def test_lines_are_read_from_any_number(after: int) -> None:
    # 2000 lines fill several blocks, with about 300 lines each.
    log = filled_log(2000)
    log.close()
    assert log.count == 2000
    assert event_numbers(read_lines(log, after)) == list(range(after, 2000))


def test_follower_receives_later_lines() -> None:
    log = filled_log(10)
    batches: list[bytes] = []
    reader = threading.Thread(target=lambda: batches.extend(log.follow(5)))
    reader.start()
    append_events(log, range(10, 3000))
    log.close()
    reader.join(5)
    # Heartbeats are empty lines.
    lines = [line for line in b"".join(batches).splitlines() if line]
    assert event_numbers(lines) == list(range(5, 3000))


def test_old_lines_are_compressed() -> None:
    log = filled_log(10_000)
    assert log._block_bytes + log._recent_bytes < 10_000 * 110 / 5
    assert log._recent_bytes <= 2 * BLOCK_BYTES


def test_reader_of_dropped_lines_is_refused() -> None:
    log = filled_log(20_000, limit=20_000)
    with pytest.raises(Refused, match="event 0 was dropped"):
        log.follow(0)
    log.close()
    oldest = log.count - log._block_lines - len(log._recent)
    assert oldest > 0
    assert len(read_lines(log, oldest)) == log.count - oldest


def test_slow_reader_of_dropped_line_is_refused() -> None:
    log = filled_log(20_000, limit=20_000)
    oldest = log.count - log._block_lines - len(log._recent)
    slow_reader = log.follow(oldest)
    next(slow_reader)
    for number in range(20_000):
        log.append(f"more {number} {'y' * 100}")
    with pytest.raises(Refused):
        list(slow_reader)


def test_number_beyond_the_end_is_refused() -> None:
    with pytest.raises(Refused, match="event 4 does not exist: 3"):
        filled_log(3).follow(4)


def test_quiet_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed_agent.events.HEARTBEAT_SECONDS", 0.01)
    stream = filled_log(1).follow(0)
    assert next(stream).startswith(b"event 0")
    assert next(stream) == b"\n"


def test_closed_log_can_be_reopened() -> None:
    log = filled_log(2)
    log.close()
    assert len(read_lines(log)) == 2
    log.reopen()
    log.append("more")
    log.close()
    assert len(read_lines(log, 2)) == 1


def test_lines_in_quick_succession_are_read_together() -> None:
    log, batches = EventLog(1000), []
    reader = threading.Thread(target=lambda: batches.extend(log.follow(0)))
    reader.start()
    for number in range(50):
        log.append(str(number))
        time.sleep(0.001)
    log.close()
    reader.join(5)
    expected = [str(number).encode() for number in range(50)]
    assert b"".join(batches).split() == expected
    # Lines gather for 10 ms before a reader is woken up.
    assert len(batches) < 25
