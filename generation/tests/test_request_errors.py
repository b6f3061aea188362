"""Requests that lose stages continue; the error of a request that fails reaches the user unchanged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import testbed
from testbed.common.errors import TestbedError
from testbed.simulation.world import ProgramError
from testbed_generation.decoding import Progress, Service, serve_requests
from testbed_generation.requests import Request
from tests.helpers.worlds import make_world


def tokens_of(result: testbed.Result) -> dict[int, list[int]]:
    """Return the tokens of each request by its number."""
    tokens: dict[int, list[int]] = {}
    for event in result.run.outcome.events:
        if event.event == "token":
            tokens.setdefault(event.fields["request"], []).append(event.fields["token"])
    return tokens


@pytest.mark.parametrize("spares", [[], ["pi4"]], ids=["no-spare", "spare"])
def test_petals_continues_after_restart(spares: list[str], tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "workload.prompts": ["Once upon a time", "The sea"],
        "workload.tokens": 12,
        "workload.concurrency": 2,
        "workload.sampling": {"temperature": 1},
        "workload.method": {
            "name": "petals",
            "partition": "even",
            "recovery": "restart",
            "spares": spares,
        },
        "faults": [
            {"kill": "pi3", "when": {"device": "pi1", "event": "token", "micro": 5}}
        ],
        "expect": {},
    }
    with_fault = testbed.load("generation/kill", changes)
    without_fault = testbed.load("generation/kill", {**changes, "faults": []})
    result = testbed.simulate(with_fault, tmp_path / "fault")
    expected = testbed.simulate(without_fault, tmp_path / "no-fault")
    assert result.run.outcome.status == "finished"
    assert tokens_of(result) == tokens_of(expected)


def test_error_of_request_is_not_wrapped_in_group() -> None:
    class FailingDecoder:
        async def next_tokens(self, progress: Progress) -> list[int]:
            # Both requests have started when the first one fails.
            await asyncio.sleep(0)
            raise TestbedError(f"no stage for request {progress.request.number}")

        def forget_request(self, number: int) -> None:
            pass

    requests = [Request(number, (1, 2), 0.0, 3) for number in range(2)]

    async def program(device: Any) -> None:
        await serve_requests(device, FailingDecoder(), Service(requests, concurrency=2))

    with pytest.raises(ProgramError, match="the program of a failed") as raised:
        make_world({"a": program}).run()
    cause = raised.value.__cause__
    assert isinstance(cause, TestbedError)
    assert str(cause) == "no stage for request 0"
