"""Planner of distributed inference: plans, alternatives and rejected problems."""

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
from testbed_stahl.communication import (
    Phase,
    make_phases,
    predict_interval,
    predict_latency,
)
from testbed_stahl.dataflow import make_dataflow
from testbed_stahl.options import DistributedOptions, SchemeName
from testbed_stahl.planner import (
    DistributedDetails,
    alternatives,
    assignments_for,
    plan,
)
from tests.helpers.graphs import FOUR_LAYERS, plan_settings


def make_problem(
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


def test_plan_survives_json_and_assigns_whole_model() -> None:
    problem = make_problem({"source": "d1"})
    decoded = Plan.model_validate_json(
        plan("distributed", problem).model_dump_json()
    ).with_details(DistributedDetails)
    distributed = decoded.details.distributed
    assert (decoded.coordinator, distributed.devices[distributed.source]) == (
        "d1",
        "d1",
    )
    assert (
        sum(part.parameters or 0 for part in decoded.assignments)
        == problem.model.parameters
    )
    assert (
        sum(part.flops or 0 for part in decoded.assignments)
        == problem.model.forward_flops
    )
    assert assignments_for(problem, ["d0", "d1", "d2"]) == decoded.assignments
    assert (
        sum(part.parameters or 0 for part in assignments_for(problem, ["d1", "d2"]))
        == problem.model.parameters
    )


def bits_of_message(values: int) -> int:
    return 8 * wire_bytes(4 * values + ENVELOPE)


def phases_of_scheme(
    scheme: SchemeName,
    devices: list[DeviceSpec],
    links: dict[tuple[str, str], Link],
) -> tuple[Phase, ...]:
    plan = fitting_plan(FOUR_LAYERS, devices, plan_settings(scheme))
    flow = make_dataflow(FOUR_LAYERS, plan, plan_settings())
    return make_phases(flow, devices, links)


def test_predicted_latency_sums_slower_of_compute_and_transfer() -> None:
    # LOP on 4-8-16-4-4 over two devices at 10 multiplications a second; messages of a phase never share a link.
    devices = [DeviceSpec("a", 20.0, 1e9), DeviceSpec("b", 20.0, 1e9, downlink=4000.0)]
    links = {("a", "b"): Link(8000.0, 0.5), ("b", "a"): Link(2000.0, 0.25)}
    # Values that alternative device needs of the other one, layer by layer.
    sent_bits = [bits_of_message(values) for values in (4, 4, 8, 2)]
    returned_bits = [bits_of_message(values) for values in (4, 8, 2, 2)]
    # Seconds of half of 32, 128, 64 and 16 multiplications.
    work = (1.6, 6.4, 3.2, 0.8)
    expected = sent_bits[0] / 4000 + 0.5
    for layer in range(3):
        sending = sent_bits[layer + 1] / 4000 + 0.5
        returning = returned_bits[layer] / 2000 + 0.25
        expected += work[layer] + max(sending, returning)
    expected += work[3] + returned_bits[3] / 2000 + 0.25
    phases = phases_of_scheme("lop", devices, links)
    assert predict_latency(phases) == pytest.approx(expected)
    assert predict_interval(phases) == predict_latency(phases)
    # With many requests in flight, computing (12 s) or sending limits the interval.
    network = sum(phase.network for phase in phases)
    assert predict_interval(phases, in_flight=9) == pytest.approx(max(12, network))
    # One device takes 24 s for all 240 multiplications.
    assert predict_interval(phases_of_scheme("single", devices, links)) == 24


def test_planned_communication_depends_on_shares() -> None:
    # A fast source computes most of the model, so it sends fewer elements than with equal shares.
    problem = make_problem({"scheme": "lip", "tiled_layers": 0})
    source, *others = problem.devices
    unequal = replace(problem, devices=(replace(source, speed=8e9), *others))
    equal_demands, unequal_demands = (
        plan("distributed", posed).details.demands for posed in (problem, unequal)
    )
    assert unequal_demands.communication < equal_demands.communication
    for demands in (equal_demands, unequal_demands):
        sent = pytest.approx(demands.sent_elements, rel=0.02)
        assert demands.communication == sent


def test_alternatives_list_all_schemes_and_mark_chosen_one() -> None:
    choices = alternatives(make_problem({"scheme": "fuse"}))
    assert [alternative.name for alternative in choices if alternative.chosen] == [
        "fuse"
    ]
    assert [alternative.name for alternative in choices] == [
        "single",
        "sequential",
        "lop",
        "lip",
        "fuse",
        "optimal",
    ]
    assert choices[0].wire_bytes == 0
    assert choices[0].step_time == 2 * make_problem().model.forward_flops / 1e9
    assert all(
        alternative.step_time
        for alternative in alternatives(make_problem({"exchange": "direct"}))
    )
    assert choices[4].notes == "fused 0+1, 2+3"
    assert set(choices[4].memory) == {"d0", "d1", "d2"}
    json.dumps([alternative.details for alternative in choices])


def test_alternatives_table_marks_schemes_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, table, _ = alternatives_table(alternatives(make_problem(memory=1.4e6)))
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


def test_star_suffices_if_all_traffic_passes_source() -> None:
    assert plan("distributed", make_problem(mesh=False))
    # The sequential scheme sends from worker to worker, for which a star has no link.
    names = [alternative.name for alternative in alternatives(make_problem(mesh=False))]
    assert names == ["single", "lop", "lip", "fuse", "optimal"]
    with pytest.raises(
        InputError, match="no link leads from d1 to d2: use the topology mesh"
    ):
        plan("distributed", make_problem({"exchange": "direct"}, mesh=False))
    for scheme in ("lop", "single"):
        with pytest.raises(InputError, match="no link leads from d0 to d2"):
            plan("distributed", star_around_another(scheme))
    assert plan(
        "distributed",
        make_problem({"scheme": "single", "exchange": "direct"}, mesh=False),
    )


def star_around_another(scheme: str) -> PlanningProblem:
    problem = make_problem({"source": "d2", "scheme": scheme})
    links = {pair: link for pair, link in problem.links.items() if "d1" in pair}
    return PlanningProblem(
        problem.devices,
        links,
        problem.workload,
        problem.options,
        problem.seed,
        model=problem.model,
    )


def test_impossible_plan_is_rejected_with_key() -> None:
    with pytest.raises(
        InputError,
        match=r"method.source: unknown device 'd9': choose one of d0, d1, d2",
    ):
        plan("distributed", make_problem({"source": "d9"}))
    with pytest.raises(
        InputError,
        match=r"d0 has 450 kB of memory.* 4 devices would do, the added ones like d2",
    ):
        plan("distributed", make_problem(memory=0.45e6))
    with pytest.raises(
        InputError,
        match=r"method.fused_pairs: layers 0 and 2 .* choose from 0\+1, 1\+2, 2\+3",
    ):
        plan("distributed", make_problem({"scheme": "fuse", "fused_pairs": [[0, 2]]}))
    with pytest.raises(InputError, match=r"method.tiled_layers: .* use 0"):
        plan("distributed", make_problem({"tiled_layers": 1}))
    with pytest.raises(
        InputError, match=r"method.tile_grid: no layer of mlp is tiled: remove the key"
    ):
        plan("distributed", make_problem({"tile_grid": [2, 2]}))
