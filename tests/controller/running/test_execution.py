"""Execution of a run: the order of jobs, and the weights after the end."""

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


def test_jobs_of_one_key_keep_their_order() -> None:
    finished: list[str] = []

    def job(name: str, seconds: float) -> None:
        time.sleep(seconds)
        finished.append(name)

    with ThreadPoolExecutor(4) as pool:
        executor = KeyedExecutor(pool)
        # The first job takes longest, although the pool could run all three at once.
        executor.submit("a", lambda: job("kill", 0.1))
        executor.submit("a", lambda: job("restart", 0.0))
        executor.submit("a", lambda: job("pause", 0.0))
    assert finished == ["kill", "restart", "pause"]


def test_jobs_of_different_keys_run_concurrently() -> None:
    # The barrier breaks unless both jobs wait at the same time.
    barrier = threading.Barrier(2, timeout=5)

    def meet() -> None:
        barrier.wait()

    with ThreadPoolExecutor(4) as pool:
        executor = KeyedExecutor(pool)
        executor.submit("a", meet)
        executor.submit("b", meet)
    assert not barrier.broken


def test_failed_job_does_not_block_the_next_one() -> None:
    finished: list[str] = []

    def fail() -> None:
        raise ValueError

    with ThreadPoolExecutor(2) as pool:
        executor = KeyedExecutor(pool)
        executor.submit("a", fail)
        executor.submit("a", lambda: finished.append("next"))
    assert finished == ["next"]


def final_weights(answer: bytes | TestbedError) -> tuple[bytes | None, list[str]]:
    """Return the final weights and losses after a response of the coordinator."""

    def weights(_seconds: float) -> bytes:
        if isinstance(answer, TestbedError):
            raise answer
        return answer

    lab = SimpleNamespace(agent=lambda _name: SimpleNamespace(weights=weights))
    inputs = SimpleNamespace(complete=lambda weights: weights)
    execution = SimpleNamespace(_lab=lab, _coordinator="source", _inputs=inputs)
    return Execution._fetch_final_weights(cast(Execution, execution), 1.0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"weights", (b"weights", [])),
        (AgentError("this device's program exposes no weights"), (None, [])),
        (
            AgentGone("gone"),
            (None, ["the weights: source went down as its program ended"]),
        ),
    ],
    ids=["weights", "no weights", "coordinator down"],
)
def test_only_lost_weights_are_reported_as_missing(
    answer: bytes | TestbedError, expected: tuple[bytes | None, list[str]]
) -> None:
    assert final_weights(answer) == expected
