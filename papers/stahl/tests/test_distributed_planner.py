"""Planning of a distributed inference from a problem: its plan, its alternatives, what is refused."""

import json
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from rich.console import Console

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.method import PlanningProblem
from testbed.ml.models import create
from testbed.network.link import Link
from testbed.plan import Plan
from testbed.wire.framing import wire_bytes
from testbed.wire.message import ENVELOPE
from testbed.work import WorkloadPart
from testbed_controller.cli.plan import alternatives_table
from testbed_controller.report.tables import draw_section
from testbed_stahl.candidates import fitting_plan
from testbed_stahl.communication import make_phases, predict_interval, predict_latency
from testbed_stahl.dataflow import make_dataflow
from testbed_stahl.options import DistributedOptions
from testbed_stahl.planner import (
    DistributedDetails,
    alternatives,
    assignments_for,
    plan,
)
from tests.helpers.graphs import FOUR_LAYERS, plan_settings


def problem(
    options: dict[str, Any] | None = None,
    memory: float = 1e9,
    count: int = 3,
    mesh: bool = True,
) -> PlanningProblem:
    names = [f"d{index}" for index in range(count)]
    pairs = [
        (one, other)
        for one, other in permutations(names, 2)
        if mesh or "d0" in (one, other)
    ]
    workload = {
        "task": "infer",
        "model": {"name": "mlp"},
        "method": {"name": "distributed"},
        "batch_size": 2,
        "requests": 1,
    }
    return PlanningProblem(
        tuple(DeviceSpec(name, 1e9, memory) for name in names),
        dict.fromkeys(pairs, Link()),
        WorkloadPart.model_validate(workload),
        DistributedOptions.model_validate(options or {}),
        seed=1,
        model=create("mlp", {"hidden": [600, 300, 600]}, (1, 8, 8), 10),
    )


def test_a_plan_travels_as_json_and_says_what_each_device_has_to_do() -> None:
    posed = problem({"source": "d1"})
    found = Plan.model_validate_json(
        plan("distributed", posed).model_dump_json()
    ).with_details(DistributedDetails)
    decided = found.details.distributed
    assert (found.coordinator, decided.devices[decided.source]) == ("d1", "d1")
    assert (
        sum(part.parameters or 0 for part in found.assignments)
        == posed.model.parameters
    )
    assert (
        sum(part.flops or 0 for part in found.assignments) == posed.model.forward_flops
    )
    assert assignments_for(posed, ["d0", "d1", "d2"]) == found.assignments
    assert (
        sum(part.parameters or 0 for part in assignments_for(posed, ["d1", "d2"]))
        == posed.model.parameters
    )


def test_the_time_of_a_request_is_computing_or_sending_phase_by_phase() -> None:
    # LOP on 4-8-16-4-4 over two devices at 10 multiplications a second; each message is alone on its link in its phase.
    crew = [DeviceSpec("a", 20.0, 1e9), DeviceSpec("b", 20.0, 1e9, downlink=4000.0)]
    links = {("a", "b"): Link(8000.0, 0.5), ("b", "a"): Link(2000.0, 0.25)}
    there, back = (
        [8 * wire_bytes(4 * size + ENVELOPE) for size in sizes]
        for sizes in ((4, 4, 8, 2), (4, 8, 2, 2))
    )
    expected = there[0] / 4000 + 0.5
    for work, sent, returned in zip((1.6, 6.4, 3.2), there[1:], back, strict=False):
        expected += work + max(sent / 4000 + 0.5, returned / 2000 + 0.25)
    expected += 0.8 + back[3] / 2000 + 0.25
    divided = make_phases(
        make_dataflow(
            FOUR_LAYERS,
            fitting_plan(FOUR_LAYERS, crew, plan_settings("lop")),
            plan_settings(),
        ),
        crew,
        links,
    )
    assert predict_latency(divided) == pytest.approx(expected)
    assert predict_interval(divided) == predict_latency(divided)
    assert predict_interval(divided, in_flight=9) == pytest.approx(
        max(12, sum(phase.network for phase in divided))
    )
    alone = make_dataflow(
        FOUR_LAYERS,
        fitting_plan(FOUR_LAYERS, crew, plan_settings("single")),
        plan_settings(),
    )
    assert predict_interval(make_phases(alone, crew, links)) == 24


def test_communication_is_that_of_the_shares_that_are_planned() -> None:
    """A source with most of the speed computes most itself, and sends less than with equal shares."""
    posed = problem({"scheme": "lip", "tiled_layers": 0})
    source, *others = posed.devices
    unequal = replace(posed, devices=(replace(source, speed=8e9), *others))
    equal, found = (
        plan("distributed", each).details.demands for each in (posed, unequal)
    )
    assert found.communication < equal.communication
    assert found.communication == pytest.approx(found.sent_elements, rel=0.02)
    assert equal.communication == pytest.approx(equal.sent_elements, rel=0.02)


def test_every_scheme_is_shown_beside_the_one_that_is_chosen() -> None:
    found = alternatives(problem({"scheme": "fuse"}))
    assert [each.name for each in found if each.chosen] == ["fuse"]
    assert [each.name for each in found] == [
        "single",
        "sequential",
        "lop",
        "lip",
        "fuse",
        "optimal",
    ]
    assert found[0].wire_bytes == 0
    assert found[0].step_time == 2 * problem().model.forward_flops / 1e9
    assert all(each.step_time for each in alternatives(problem({"exchange": "direct"})))
    assert found[4].notes == "fused 0+1, 2+3"
    assert set(found[4].memory) == {"d0", "d1", "d2"}
    json.dumps([each.details for each in found])


def test_the_alternatives_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, table, _ = alternatives_table(alternatives(problem(memory=1.4e6)))
    Console(width=160).print(draw_section(table, 160))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["scheme", "weights", "memory"]
    assert [line.split()[0] for line in lines[2:8]] == [
        "single",
        "sequential",
        "lop",
        "lip",
        "fuse",
        "optimal",
    ]
    assert "does not fit" in lines[2]
    assert "*" in lines[7]


def test_a_star_suffices_where_everything_passes_the_source() -> None:
    assert plan("distributed", problem(mesh=False))
    # Layers in a row need a link between the others.
    found = [each.name for each in alternatives(problem(mesh=False))]
    assert found == ["single", "lop", "lip", "fuse", "optimal"]
    with pytest.raises(
        InputError, match="no link leads from d1 to d2: use the topology mesh"
    ):
        plan("distributed", problem({"exchange": "direct"}, mesh=False))
    for scheme in ("lop", "single"):
        with pytest.raises(InputError, match="no link leads from d0 to d2"):
            plan("distributed", star_around_another(scheme))
    assert plan(
        "distributed", problem({"scheme": "single", "exchange": "direct"}, mesh=False)
    )


def star_around_another(scheme: str) -> PlanningProblem:
    posed = problem({"source": "d2", "scheme": scheme})
    links = {pair: link for pair, link in posed.links.items() if "d1" in pair}
    return PlanningProblem(
        posed.devices,
        links,
        posed.workload,
        posed.options,
        posed.seed,
        model=posed.model,
    )


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"method.source: unknown device 'd9': choose one of d0, d1, d2",
    ):
        plan("distributed", problem({"source": "d9"}))
    with pytest.raises(
        InputError,
        match=r"d0 has 450 kB of memory.* 4 devices would do, the added ones like d2",
    ):
        plan("distributed", problem(memory=0.45e6))
    with pytest.raises(
        InputError,
        match=r"method.fused_pairs: layers 0 and 2 .* choose from 0\+1, 1\+2, 2\+3",
    ):
        plan("distributed", problem({"scheme": "fuse", "fused_pairs": [[0, 2]]}))
    with pytest.raises(InputError, match=r"method.tiled_layers: .* use 0"):
        plan("distributed", problem({"tiled_layers": 1}))
    with pytest.raises(
        InputError, match=r"method.tile_grid: no layer of mlp is tiled: remove the key"
    ):
        plan("distributed", problem({"tile_grid": [2, 2]}))
