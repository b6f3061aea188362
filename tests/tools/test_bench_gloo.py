"""The bench's comparison with torch's pipelining over gloo, as far as it needs no containers."""

from __future__ import annotations

import pytest
import torch

from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.trace.host import HostTime
from testbed.trace.record import Step
from tools.bench import gloo, gloo_program


@pytest.mark.parametrize("schedule", gloo.SCHEDULES)
def test_its_stages_are_the_plans(schedule: str) -> None:
    prepared = prepare(trials(gloo.scenario(schedule))[0])
    jobs = gloo.jobs(prepared.plan, schedule)
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
        stage = gloo_program.layers(job["widths"], job["first"], job["last"])
        values = stage(values)
        crossing.append(values.shape)
        parameters += sum(each.numel() for each in stage.parameters())
    assert crossing == [(5, 512), (5, 512), (5, 512), (5, 10)]
    assert parameters == sum(unit.parameters for unit in prepared.problem.model.units)


def test_only_the_models_last_layer_has_no_relu() -> None:
    kinds = [type(layer).__name__ for layer in gloo_program.layers([4, 3, 2], 0, 2)]
    assert kinds == ["Linear", "ReLU", "Linear"]


def test_our_steps_are_whole_and_warm() -> None:
    def step(number: int, seconds: float, steady: bool = True) -> Step:
        return Step(
            "device1", number, 1.0 * number, seconds, 0.1, 256, True, True, steady
        )

    steps = [step(number, 9.0) for number in range(gloo.WARM_UP)]
    steps += [step(gloo.WARM_UP, 0.3), step(gloo.WARM_UP + 1, 0.1, steady=False)]
    assert gloo.our_times(steps) == [0.3]


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (0.31, [True, True]),
        (0.4, [True, False]),
        (0.45, [False, False]),
        (0.2, [True, False]),
    ],
)
def test_the_goals(ours: float, expected: list[bool]) -> None:
    figures = list(gloo.judge("1f1b", ours, 0.5, 0.3, HostTime(1.0, 0.02, 0.01)))
    assert [
        figure.reached for figure in figures if figure.reached is not None
    ] == expected


def test_what_the_host_added_is_told_beside() -> None:
    figures = {
        figure.name: figure
        for figure in gloo.judge("gpipe", 0.4, 0.5, 0.3, HostTime(4.0, 0.8, 0.2))
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


def test_what_ours_takes_beside_computing_is_a_share_of_what_torchs_takes() -> None:
    taken = {"computing": 7.0, "agents": 0.5, "shaper": 0.25, "controller": 0.25}
    *_, share = gloo.compare_processor_time("gpipe", taken, 5.0)
    assert (share.value, share.reached) == (0.2, True)
