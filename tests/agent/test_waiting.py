"""What the kernel says of threads that waited for a processor, and how exactly work is paced."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from agent import waiting
from agent.pace import measure
from agent.waiting import WaitingTime


def counted(folder: Path, **threads: object) -> None:
    """Write what the kernel counted of some threads: time on a processor, waiting for one, and how often."""
    for number, nanoseconds in threads.items():
        (folder / number[1:]).mkdir(exist_ok=True)
        (folder / number[1:] / "schedstat").write_text(f"5 {nanoseconds} 7\n" if nanoseconds is not None else "")


def test_what_came_since_the_last_time_is_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_TASKS", tmp_path)
    counted(tmp_path, t1=10**9, t2=5, t3=0)
    found = WaitingTime(without=[3])
    counted(tmp_path, t1=3 * 10**9, t2=None, t3=9 * 10**9, t4=10**9)  # one has ended, one begun
    assert found.since_last() == pytest.approx(3.0)
    assert found.since_last() == 0.0


def test_the_kernel_of_this_host_is_understood() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    found = WaitingTime()
    over.set()
    thread.join()
    assert found.since_last() >= 0.0


def test_work_takes_what_it_is_charged_one_after_the_other() -> None:
    found = measure([0.005, 0.01], 0.05)
    assert found["wall"] >= 0.05
    assert [charge for charge, *_ in found["spans"]][:4] == [0.005, 0.01, 0.005, 0.01]
    assert all(duration >= charge - 0.003 for charge, duration, *_ in found["spans"])
    assert sum(duration for _, duration, *_ in found["spans"]) >= 0.05 - 1e-6
