"""What a run hands back at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from controller.lab.clients import AgentError, AgentGone
from controller.running.execution import Execution
from testbed.common.errors import TestbedError


def final_weights(answer: bytes | TestbedError) -> tuple[bytes | None, list[str]]:
    def weights() -> bytes:
        if isinstance(answer, TestbedError):
            raise answer
        return answer

    lab = SimpleNamespace(agent=lambda _name: SimpleNamespace(weights=weights))
    return Execution._final_weights(cast(Execution, SimpleNamespace(_lab=lab, _lead="source")))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"weights", (b"weights", [])),
        (AgentError("this device's program exposes no weights"), (None, [])),
        (AgentGone("gone"), (None, ["the weights, since source went down as its program ended"])),
    ],
)
def test_weights_that_are_gone_are_missed_and_those_that_there_never_were_are_not(
    answer: bytes | TestbedError, found: tuple[bytes | None, list[str]]
) -> None:
    assert final_weights(answer) == found
