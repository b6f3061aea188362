"""What happens to one device at one instant happens in the order of the scenario."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from controller.running.keyed import KeyedExecutor


def test_jobs_about_one_thing_keep_their_order_however_long_they_take() -> None:
    done: list[str] = []

    def job(name: str, seconds: float) -> None:
        time.sleep(seconds)
        done.append(name)

    with ThreadPoolExecutor(4) as pool:
        turns = KeyedExecutor(pool)
        turns.submit("a", lambda: job("kill", 0.1))
        turns.submit("a", lambda: job("restart", 0.0))
        turns.submit("a", lambda: job("pause", 0.0))
    assert done == ["kill", "restart", "pause"]


def test_jobs_about_different_things_go_on_side_by_side() -> None:
    meet = threading.Barrier(2, timeout=5)
    with ThreadPoolExecutor(4) as pool:
        turns = KeyedExecutor(pool)
        turns.submit("a", lambda: meet.wait() and None)
        turns.submit("b", lambda: meet.wait() and None)
    assert not meet.broken


def test_a_job_that_fails_holds_up_nothing() -> None:
    done: list[str] = []

    def fail() -> None:
        raise ValueError

    with ThreadPoolExecutor(2) as pool:
        turns = KeyedExecutor(pool)
        turns.submit("a", fail)
        turns.submit("a", lambda: done.append("next"))
    assert done == ["next"]
