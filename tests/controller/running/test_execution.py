"""A run that goes on: jobs in turn, and what is explained of its end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest

from testbed.common.errors import TestbedError
from testbed_controller.lab.clients import AgentError, AgentGone
from testbed_controller.running.execution import Execution, KeyedExecutor


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


def final_weights(answer: bytes | TestbedError) -> tuple[bytes | None, list[str]]:
    def weights(_seconds: float) -> bytes:
        if isinstance(answer, TestbedError):
            raise answer
        return answer

    lab = SimpleNamespace(agent=lambda _name: SimpleNamespace(weights=weights))
    inputs = SimpleNamespace(complete=lambda weights: weights)
    execution = SimpleNamespace(_lab=lab, _coordinator="source", _inputs=inputs)
    return Execution._final_weights(cast(Execution, execution), 1.0)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"weights", (b"weights", [])),
        (AgentError("this device's program exposes no weights"), (None, [])),
        (
            AgentGone("gone"),
            (None, ["the weights: source went down as its program ended"]),
        ),
    ],
)
def test_only_lost_weights_are_reported_as_missing(
    answer: bytes | TestbedError, found: tuple[bytes | None, list[str]]
) -> None:
    assert final_weights(answer) == found
