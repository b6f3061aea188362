"""The comparison of pipelines with torch's own over gloo, without containers."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testbed.common.errors import TestbedError
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.trace.host import HostTime
from testbed.trace.record import Step
from tools.bench import gloo, gloo_program


def prepare_comparison(schedule: str) -> Prepared:
    return prepare(trials(gloo.make_scenario(schedule))[0])


@pytest.mark.parametrize("schedule", gloo.SCHEDULES)
def test_stages_of_the_comparison_are_those_of_the_plan(schedule: str) -> None:
    prepared = prepare_comparison(schedule)
    arguments_by_device = gloo.stage_arguments(prepared.plan, schedule)
    # Eight layers on four devices.
    stages = list(arguments_by_device.values())
    for rank, stage in enumerate(stages):
        layers = stage["start"], stage["stop"]
        assert stage["rank"] == rank
        assert layers == (2 * rank, 2 * rank + 2)
    assert len(stages) == 4
    assert next(iter(arguments_by_device)) == prepared.plan.coordinator
    values = torch.zeros(5, 64)
    parameters = 0
    output_shapes = []
    for stage in stages:
        module = gloo_program.make_layers(
            stage["widths"], stage["start"], stage["stop"]
        )
        values = module(values)
        output_shapes.append(values.shape)
        for tensor in module.parameters():
            parameters += tensor.numel()
    # Each cut transfers 512 values of each of the five samples; the last stage has an output for each class.
    assert output_shapes == [(5, 512), (5, 512), (5, 512), (5, 10)]
    assert parameters == sum(unit.parameters for unit in prepared.problem.model.units)


def test_last_layer_alone_has_no_relu() -> None:
    layers = gloo_program.make_layers([4, 3, 2], 0, 2)
    kinds = [type(layer).__name__ for layer in layers]
    assert kinds == ["Linear", "ReLU", "Linear"]


def test_warm_up_and_disturbed_steps_are_not_measured() -> None:
    def step(number: int, seconds: float, steady: bool = True) -> Step:
        return Step(
            "device1", number, 1.0 * number, seconds, 0.1, 256, True, True, steady
        )

    steps = [step(number, 9.0) for number in range(gloo.WARM_UP)]
    steps.append(step(gloo.WARM_UP, 0.3))
    steps.append(step(gloo.WARM_UP + 1, 0.1, steady=False))
    assert gloo.steady_step_times(steps) == [0.3]


@pytest.mark.parametrize(
    ("step_seconds", "expected"),
    [
        (0.31, [True, True]),
        (0.4, [True, False]),
        (0.45, [False, False]),
        (0.2, [True, False]),
    ],
)
def test_goals_are_a_ratio_to_gloo_and_a_deviation_from_the_plan(
    step_seconds: float, expected: list[bool]
) -> None:
    # Goals: at most 80 % of the 0.5 s over gloo, and within 5 % of the planned 0.3 s.
    host = HostTime(1.0, 0.02, 0.01)
    measurements = gloo.compare_step_times("1f1b", step_seconds, 0.5, 0.3, host)
    results = []
    for measurement in measurements:
        # Measurements without a goal have the result None.
        if measurement.reached is not None:
            results.append(measurement.reached)
    assert results == expected


def test_time_added_by_the_host_is_measured_separately() -> None:
    # The host added 0.8 s of computation and 0.2 s of messages to 4 s, a quarter.
    host = HostTime(4.0, 0.8, 0.2)
    by_name = {}
    for measurement in gloo.compare_step_times("gpipe", 0.4, 0.5, 0.3, host):
        by_name[measurement.name] = measurement
    # Three quarters of 0.4 s are the planned 0.3 s.
    corrected = by_name[
        "step by gpipe, ours without what the host added, away from the plan"
    ]
    assert corrected.value == pytest.approx(0.0)
    assert corrected.reached is None
    deviation = by_name["step by gpipe, ours away from the plan"]
    assert deviation.value == pytest.approx(0.4 / 0.3 - 1)
    assert by_name["step by gpipe, ours"].detail.startswith(
        "of this the host added 25.0%: 20.0% by computing late"
    )


def test_overhead_is_a_share_of_torchs_processor_time() -> None:
    # All but the computation: 1 s of agents, shaper and controller, to 5 s of torch.
    seconds = {"computing": 7.0, "agents": 0.5, "shaper": 0.25, "controller": 0.25}
    *_, share = gloo.compare_processor_time("gpipe", seconds, 5.0)
    assert (share.value, share.reached) == (0.2, True)


class FakeEngine:
    """A docker client with the (output, exit code, seconds) of each device's program."""

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
    ("first_outcomes", "error"),
    [
        # The first device fails later, because the connection to the second one is closed.
        ([(b"closed", 1, 0.2), (b"no memory", 1, 0.0)], "device2: no memory"),
        ([(b"{}", 0, 0.0), (None, 0, 0.0)], "device2: the program printed nothing"),
    ],
    ids=["two failures", "no output"],
)
def test_first_failed_stage_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    first_outcomes: list[tuple[bytes | None, int, float]],
    error: str,
) -> None:
    plan = prepare_comparison("gpipe").plan
    outcomes: dict[str, tuple[bytes | None, int, float]] = {}
    devices = {}
    for name in plan.devices:
        outcomes[name] = (b"{}", 0, 0.0)
        devices[name] = SimpleNamespace(id=name, name=name, address="10.0.0.1")
    outcomes |= zip(plan.devices, first_outcomes, strict=False)
    engine = FakeEngine(outcomes)
    monkeypatch.setattr(gloo, "connect", lambda: engine)
    lab: Any = SimpleNamespace(devices=devices)
    with pytest.raises(TestbedError, match=error):
        gloo.measure_gloo(lab, plan, "gpipe")
    assert engine.is_closed
