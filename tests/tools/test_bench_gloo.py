"""Comparison of the bench with pipelines of torch over gloo, without containers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testbed.common.errors import TestbedError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.trace.host import HostTime
from testbed.trace.record import Step
from tools.bench import gloo, gloo_program


@pytest.mark.parametrize("schedule", gloo.SCHEDULES)
def test_stages_of_the_comparison_are_those_of_the_plan(schedule: str) -> None:
    prepared = prepare(trials(gloo.make_scenario(schedule))[0])
    jobs = gloo.stage_arguments(prepared.plan, schedule)
    assert [(job["rank"], job["first"], job["last"]) for job in jobs.values()] == [
        (0, 0, 2),
        (1, 2, 4),
        (2, 4, 6),
        (3, 6, 8),
    ]
    assert next(iter(jobs)) == prepared.plan.coordinator
    values = torch.zeros(5, 64)
    parameters, crossing = 0, []
    for job in jobs.values():
        stage = gloo_program.make_layers(job["widths"], job["first"], job["last"])
        values = stage(values)
        crossing.append(values.shape)
        parameters += sum(each.numel() for each in stage.parameters())
    assert crossing == [(5, 512), (5, 512), (5, 512), (5, 10)]
    assert parameters == sum(unit.parameters for unit in prepared.problem.model.units)


def test_last_layer_alone_has_no_relu() -> None:
    kinds = [
        type(layer).__name__ for layer in gloo_program.make_layers([4, 3, 2], 0, 2)
    ]
    assert kinds == ["Linear", "ReLU", "Linear"]


def test_warm_up_and_disturbed_steps_are_not_measured() -> None:
    def step(number: int, seconds: float, steady: bool = True) -> Step:
        return Step(
            "device1", number, 1.0 * number, seconds, 0.1, 256, True, True, steady
        )

    steps = [step(number, 9.0) for number in range(gloo.WARM_UP)]
    steps += [step(gloo.WARM_UP, 0.3), step(gloo.WARM_UP + 1, 0.1, steady=False)]
    assert gloo.steady_step_times(steps) == [0.3]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (0.31, [True, True]),
        (0.4, [True, False]),
        (0.45, [False, False]),
        (0.2, [True, False]),
    ],
)
def test_goal_is_reached_by_a_step_as_fast_as_torchs_and_as_planned(
    ours: float, expected: list[bool]
) -> None:
    figures = list(
        gloo.compare_step_times("1f1b", ours, 0.5, 0.3, HostTime(1.0, 0.02, 0.01))
    )
    assert [
        figure.reached for figure in figures if figure.reached is not None
    ] == expected


def test_time_added_by_the_host_is_a_measurement_of_its_own() -> None:
    figures = {
        figure.name: figure
        for figure in gloo.compare_step_times(
            "gpipe", 0.4, 0.5, 0.3, HostTime(4.0, 0.8, 0.2)
        )
    }
    own = figures["step by gpipe, ours without what the host added, away from the plan"]
    assert own.value == pytest.approx(0.0)
    assert own.reached is None
    assert figures["step by gpipe, ours away from the plan"].value == pytest.approx(
        1 / 3
    )
    assert figures["step by gpipe, ours"].detail.startswith(
        "of this the host added 25.0%: 20.0% by computing late"
    )


def test_overhead_is_a_share_of_torchs_overhead() -> None:
    taken = {"computing": 7.0, "agents": 0.5, "shaper": 0.25, "controller": 0.25}
    *_, share = gloo.compare_processor_time("gpipe", taken, 5.0)
    assert (share.value, share.reached) == (0.2, True)


class EngineOfPrograms:
    """A docker client whose programs end with an output, an exit code and after some seconds."""

    def __init__(self, outcomes: dict[str, tuple[bytes | None, int, float]]) -> None:
        self._outcomes = outcomes
        self.is_closed = False
        self.api = self

    def exec_create(self, name: str, *_: Any, **__: Any) -> dict[str, str]:
        return {"Id": name}

    def exec_start(self, name: str, **_: Any) -> tuple[bytes | None, None]:
        output, _, seconds = self._outcomes[name]
        time.sleep(seconds)
        return output, None

    def exec_inspect(self, name: str) -> dict[str, int]:
        return {"ExitCode": self._outcomes[name][1]}

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([(b"closed", 1, 0.2), (b"no memory", 1, 0.0)], "device2: no memory"),
        ([(b"{}", 0, 0.0), (None, 0, 0.0)], "device2: the program printed nothing"),
    ],
)
def test_first_failed_stage_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: list[tuple[bytes | None, int, float]],
    said: str,
) -> None:
    plan = prepare(trials(gloo.make_scenario("gpipe"))[0]).plan
    names = plan.devices
    programs = dict.fromkeys(names, (b"{}", 0, 0.0)) | dict(
        zip(names, outcomes, strict=False)
    )
    devices = {
        name: SimpleNamespace(id=name, name=name, address="10.0.0.1") for name in names
    }
    engine = EngineOfPrograms(programs)
    monkeypatch.setattr(gloo, "connect", lambda: engine)
    lab: Any = SimpleNamespace(devices=devices)
    with pytest.raises(TestbedError, match=said):
        gloo.measure_gloo(lab, plan, "gpipe")
    assert engine.is_closed
