"""Plans: who computes what, what that takes and sends, devices of unequal speed and memory, and refusals."""

import time
from itertools import pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.hardware import DeviceSpec
from testbed.ml.models import create
from testbed.ml.models.chain import chain
from testbed.ml.models.graph import Graph, graph_of
from testbed.ml.models.layers import (
    BatchNorm2d,
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    ReLU,
    Residual,
)
from testbed.ml.models.shapes import INPUT
from testbed.wire.framing import wire_bytes
from testbed_stahl.candidates import enough_devices, fitting_plan
from testbed_stahl.communication import (
    Transfer,
    all_transfers,
    sent_elements,
    tile_transfers,
)
from testbed_stahl.dataflow import Dataflow, make_dataflow
from testbed_stahl.demands import (
    count_multiplications,
    count_parameters,
    count_weights,
    longest_path,
    memory_needs,
    peak_activations,
)
from testbed_stahl.options import SCHEMES, PlanSettings, SchemeName
from testbed_stahl.plan import DistributedPlan
from testbed_stahl.planner import compare_schemes, plan_demands
from testbed_stahl.schemes import WorkerTotals, total_communication
from tests.helpers.graphs import FOUR_LAYERS, plan_settings, random_chains, yolov2

YOLO = yolov2()
HALF_AND_HALO = 304 + 1 + 2 + 4 + 4 + 8 + 8 + 16 + 16


def devices(*speeds: float, memory: float = 4e9) -> list[DeviceSpec]:
    return [
        DeviceSpec(f"d{index}", speed, memory) for index, speed in enumerate(speeds)
    ]


def even(count: int, memory: float = 4e9) -> list[DeviceSpec]:
    return devices(*[1e9] * count, memory=memory)


def planned(graph: Graph, crew: list[DeviceSpec], request: PlanSettings) -> Dataflow:
    """Return a plan as it is carried out."""
    return make_dataflow(graph, fitting_plan(graph, crew, request), request)


def counted(found: Dataflow) -> tuple[tuple[int, ...], int, int]:
    return held(found), longest_path(found), sent_elements(all_transfers(found))


def held(found: Dataflow) -> tuple[int, ...]:
    return tuple(count_weights(found, device) for device in found.devices)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (plan_settings("single"), ((240, 0), 240, 0)),
        (plan_settings("lop"), ((120, 120), 120, 34)),
        (plan_settings("lip"), ((120, 120), 120, 48)),
        (plan_settings("fuse", fused_pairs=((0, 1), (2, 3))), ((120, 120), 120, 40)),
        (plan_settings("fuse"), ((120, 120), 120, 22)),
        (plan_settings("optimal"), ((120, 120), 120, 22)),
    ],
)
def test_the_four_layer_example_is_the_papers(
    wanted: PlanSettings, expected: tuple[tuple[int, int], int, int]
) -> None:
    assert counted(planned(FOUR_LAYERS, even(2), wanted)) == expected


def test_sequential_mapping_of_the_four_layer_example_is_the_papers_and_also_returns_the_result() -> (
    None
):
    found = planned(FOUR_LAYERS, even(2), plan_settings("sequential"))
    assert counted(found)[:2] == ((160, 80), 240)
    assert all_transfers(found) == (Transfer(0, 1, 1, (16,)), Transfer(1, 0, 3, (4,)))


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_where_channels_divide_what_is_sent_is_what_the_formulas_say(
    scheme: SchemeName, count: int
) -> None:
    graph = graph_of(create("mlp", {"hidden": [64, 128, 32, 64]}, (1, 8, 8), 16))
    found = planned(graph, even(count), plan_settings(scheme))
    schemes = [part.scheme for part in found.plan.layers]
    assert sent_elements(all_transfers(found)) == total_communication(
        graph, schemes, WorkerTotals.equal(count)
    )


@settings(deadline=None)
@given(
    random_chains(),
    st.lists(st.sampled_from([1.0, 2.0, 3.5, 10.0]), min_size=1, max_size=8),
    st.data(),
)
def test_every_scheme_computes_everything_once_and_sends_what_is_needed(
    graph: Graph, speeds: list[float], data: st.DataObject
) -> None:
    scheme = data.draw(st.sampled_from(SCHEMES))
    source = data.draw(st.integers(0, len(speeds) - 1))
    found = fitting_plan(graph, devices(*speeds), plan_settings(scheme, source=source))
    assert DistributedPlan.model_validate_json(found.model_dump_json()) == found
    for index, (layer, part) in enumerate(zip(graph.layers, found.layers, strict=True)):
        ranges = part.outputs or part.inputs
        if ranges:
            size = layer.output_channels if part.outputs else layer.input_channels
            assert (ranges[0].first, ranges[-1].last) == (0, size)
            assert all(one.last == other.first for one, other in pairwise(ranges))
        if part.scheme == "fuse2":
            assert part.inputs == found.layers[index - 1].outputs
    for exchange in ("via-source", "direct"):
        spread = make_dataflow(graph, found, plan_settings(exchange=exchange))
        assert sum(held(spread)) == graph.weights
        assert sum(
            count_parameters(spread, device) for device in spread.devices
        ) == sum(each.parameters for each in graph.layers)
        assert [sum(row) for row in count_multiplications(spread)] == [
            layer.multiplications for layer in graph.layers
        ]


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_weights_per_device_fall_as_one_over_n(count: int) -> None:
    later = YOLO.layers[16:]
    early = sum(layer.weights for layer in YOLO.layers[:16])
    split = sum(layer.weights for layer in later)
    for scheme in ("lop", "fuse", "optimal"):
        found = planned(YOLO, even(count), plan_settings(scheme))
        for device, stored in enumerate(held(found)):
            assert stored == pytest.approx(
                early * any(tile.device == device for tile in found.plan.tiles)
                + split / count,
                rel=0.02,
            )


def test_memory_of_the_weights_is_that_of_table_1_where_all_layers_are_divided() -> (
    None
):
    found = [
        max(held(planned(YOLO, even(count), plan_settings("lop", tiled_layers=0))))
        for count in (1, 3, 5, 6, 7)
    ]
    assert [round(4 * most / 1e6) for most in found] == [204, 68, 41, 34, 29]


def test_yolov2_on_six_devices_is_planned_as_the_paper_does() -> None:
    found = fitting_plan(YOLO, even(6), plan_settings("fuse"))
    assert found.tiling is not None
    assert len(found.tiling.tiles[0].regions) == 17
    assert {tile.device for tile in found.tiling.tiles} == set(range(6))
    fused = [index for index, part in enumerate(found.layers) if part.scheme == "fuse1"]
    assert fused == [18, 20, 23, 29]
    # Of the layers from 16 on, up to the rounding to whole channels, that is C of FUSE2: 67.3 MiB.
    spread = make_dataflow(YOLO, found, plan_settings())
    later = sent_elements(all_transfers(spread)) - sent_elements(tile_transfers(spread))
    assert 4 * later / 2**20 == pytest.approx(67.26, rel=2e-3)


@pytest.mark.timed
def test_yolov2_is_planned_on_six_devices_in_less_than_100_ms() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        fitting_plan(YOLO, even(6), plan_settings())
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.1


def test_tiles_are_sent_with_their_halo_and_collected_without() -> None:
    found = planned(YOLO, even(4), plan_settings(tile_grid=(2, 2), source=1))
    elsewhere = [tile for tile in found.plan.tiles if tile.device != 1]
    assert set(tile_transfers(found)) == {
        *(
            Transfer(1, tile.device, INPUT, (3 * tile.regions[0].pixels,))
            for tile in elsewhere
        ),
        *(Transfer(tile.device, 1, 15, (256 * 19 * 19,)) for tile in elsewhere),
    }
    # A 3x3 needs one pixel more of its input, and each pooling before it doubles that: 59 of the image.
    assert {tile.regions[0].pixels for tile in elsewhere} == {HALF_AND_HALO**2}


def test_bytes_on_the_wire_are_those_of_every_message() -> None:
    found = all_transfers(planned(FOUR_LAYERS, even(2), plan_settings("lop")))
    assert [len(each.messages) for each in found] == [1] * 8
    assert all(
        each.wire_bytes(3) == wire_bytes(3 * 4 * each.elements + 320) for each in found
    )
    graph = graph_of(create("mlp", {"hidden": [1000]}, (1, 8, 8), 10))
    some = {"samples": 2, "chunks": 3, "min_chunk_bytes": 1}
    first, *_ = (
        each
        for each in all_transfers(planned(graph, even(2), plan_settings("lop", **some)))
        if each.value == 0
    )
    assert sorted(first.messages) == [166, 167, 167]
    assert first.wire_bytes(2) == sum(
        wire_bytes(2 * 4 * each + 320) for each in first.messages
    )


def test_shares_follow_speed() -> None:
    graph = graph_of(create("mlp", {"hidden": [120, 60]}, (1, 8, 8), 12))
    found = fitting_plan(graph, devices(3e9, 1e9, 2e9), plan_settings("lop"))
    assert [each.size for each in found.layers[0].outputs] == [60, 20, 40]
    assert [each.size for each in found.layers[2].outputs] == [6, 2, 4]
    found = fitting_plan(
        graph, devices(3e9, 1e9, 2e9), plan_settings("lop", shares="equal")
    )
    assert [each.size for each in found.layers[0].outputs] == [40, 40, 40]


def test_memory_bounds_the_share_of_a_fast_device_and_the_others_take_over() -> None:
    graph = graph_of(create("mlp", {"hidden": [1000, 1000, 1000]}, (1, 8, 8), 10))
    crew = [
        DeviceSpec("small", 8e9, 1e6),
        DeviceSpec("b", 2e9, 1e9),
        DeviceSpec("c", 1e9, 1e9),
    ]
    for scheme in ("lop", "optimal"):
        spread = planned(graph, crew, plan_settings(scheme, source=1))
        assert 0.95e6 < memory_needs(spread)[0] <= 1e6
        found = spread.plan.layers[1]
        sizes = [each.size for each in (found.outputs or found.inputs)]
        assert sizes[1] == pytest.approx(2 * sizes[2], abs=2)


@settings(deadline=None, max_examples=40)
@given(
    random_chains(),
    st.lists(
        st.tuples(st.sampled_from([1.0, 3.0]), st.sampled_from([2e3, 4e3, 1e4])),
        min_size=1,
        max_size=5,
    ),
)
def test_a_plan_fits_or_is_refused(
    graph: Graph, kinds: list[tuple[float, float]]
) -> None:
    crew = [
        DeviceSpec(f"d{index}", speed, memory)
        for index, (speed, memory) in enumerate(kinds)
    ]
    for scheme in ("lop", "optimal"):
        try:
            found = planned(graph, crew, plan_settings(scheme))
        except InputError:
            continue
        assert all(
            need <= device.memory
            for need, device in zip(memory_needs(found), crew, strict=True)
        )


@pytest.mark.parametrize(("name", "memory"), [("alexnet", 80e6), ("vgg16", 150e6)])
@pytest.mark.parametrize("scheme", ["single", "sequential", "lop", "fuse", "optimal"])
def test_a_plan_too_large_is_refused_with_a_number_of_devices_that_is_indeed_the_smallest(
    name: str, memory: float, scheme: SchemeName
) -> None:
    graph = graph_of(create(name, {}, (3, 224, 224), 0))
    with pytest.raises(
        InputError, match=r"d\d has \d+ MB of memory, .* needs .* would do"
    ) as caught:
        fitting_plan(graph, even(2, memory=memory), plan_settings(scheme))
    count = int(str(caught.value).partition(" devices would do")[0].rpartition(" ")[2])
    scheme = "optimal" if "by the scheme optimal" in str(caught.value) else scheme
    assert fitting_plan(graph, even(count, memory=memory), plan_settings(scheme))
    for fewer in range(1, count):
        with pytest.raises(InputError):
            fitting_plan(graph, even(fewer, memory=memory), plan_settings(scheme))


def test_a_finer_grid_is_used_where_tiles_take_too_much_memory() -> None:
    coarse, fine = (
        fitting_plan(YOLO, even(6, memory=memory), plan_settings()).tiling
        for memory in (80e6, 60e6)
    )
    assert coarse is not None
    assert fine is not None
    assert (fine.rows, fine.columns) == (2 * coarse.rows, 2 * coarse.columns)


def test_no_number_of_devices_helps_where_activations_alone_are_too_much() -> None:
    with pytest.raises(
        InputError, match=r"no number of such devices would do.*smaller input"
    ):
        fitting_plan(YOLO, even(3, memory=10e6), plan_settings())
    assert enough_devices(YOLO, even(3, memory=10e6), plan_settings()) == 0


def test_activations_are_what_each_device_holds_at_its_widest_layer() -> None:
    def most(scheme: SchemeName, count: int = 2, **options: Any) -> tuple[int, ...]:
        found = planned(FOUR_LAYERS, even(count), plan_settings(scheme, **options))
        return tuple(peak_activations(found, device) for device in found.devices)

    # The layer from 8 to 16, done from 4 inputs before the others come: 8 sums, then 8 outputs, and 8 of the others.
    assert most("lop") == (8 + 8 + 16,) * 2
    # The source has all of the input, and both sums of all outputs before it adds them up; the other sends
    # its own. That has most of the next layer's input: 8 come back at once, or in two messages, the first of which can
    # come while it computes what the second needs.
    assert most("lip") == (8 + 2 * 16, 8)
    assert most("lip", chunks=2, min_chunk_bytes=1) == (8 + 2 * 16, 4 + 8)
    # While it still merges its 8, the other can be as far as to send sums for 2 of the next layer's 4.
    assert most("lip", exchange="direct") == (4 + 2 * 8 + 2,) * 2
    assert most("single", 1) == (24,)
    # The 16 go from one to the other in one piece, or in two, of which the second is added to what the first gives.
    assert most("sequential") == (8 + 16, 16 + 4)
    assert most("sequential", chunks=2, min_chunk_bytes=1) == (8 + 8, 16 + 4 + 4)


def test_a_described_model_has_the_models_figures_and_places() -> None:
    for name, shape in (
        ("yolov2", (3, 608, 608)),
        ("alexnet", (3, 224, 224)),
        ("vgg16", (3, 224, 224)),
    ):
        model = create(name, {}, shape, 0)
        graph = graph_of(model)
        assert graph.weights == model.weights
        assert graph.multiplications == model.multiplications
        assert sum(layer.parameters for layer in graph.layers) == model.parameters
    described = graph_of(create("yolov2", {}, (3, 608, 608), 0))
    assert len(described.layers) == 31
    for ours, theirs in zip(described.layers, YOLO.layers, strict=True):
        facts = (
            "division",
            "input",
            "output",
            "sources",
            "weights",
            "multiplications",
            "window",
        )
        assert [getattr(ours, fact) for fact in facts] == [
            getattr(theirs, fact) for fact in facts
        ]


def test_layers_of_one_unit_are_described_apart_with_what_follows_each_value_by_value() -> (
    None
):
    block = Residual((Conv2d(4, padding=1),))
    units = [
        (
            "a",
            [
                Conv2d(4, padding=1, bias=False),
                BatchNorm2d(),
                ReLU(),
                MaxPool2d(),
                Flatten(),
            ],
        ),
        ("b", [Linear(6), ReLU(), Linear(2)]),
    ]
    graph = graph_of(chain("n", (3, 8, 8), 2, units))
    assert [(layer.name, layer.division, layer.names) for layer in graph.layers] == [
        ("a", "weights", ("0.0", "0.1", "0.2")),
        ("a.1", "channels", ("0.3",)),
        ("b", "weights", ("1.0", "1.1")),
        ("b.1", "weights", ("1.2",)),
    ]
    assert graph.layers[0].channel_values == 4
    assert graph.layers[2].input == (4, 4, 4)
    assert graph.layers[2].input_channels == 4 * 4 * 4
    assert graph.layers[2].weights == prod((4, 4, 4)) * 6
    assert graph.layers[3].sources == (2,)
    (blocked, _) = graph_of(
        chain("n", (4, 2, 2), 2, [("r", [block]), ("b", [Flatten(), Linear(2)])])
    ).layers
    assert (blocked.division, blocked.splits, blocked.parameters) == (
        "no",
        False,
        block.parameters((4, 2, 2)),
    )


def test_figures_of_all_schemes_beside_each_other() -> None:
    found = {
        each.flow.plan.scheme: each
        for each in compare_schemes(FOUR_LAYERS, even(2, memory=900.0), plan_settings())
    }
    described = {name: plan_demands(each.flow) for name, each in found.items()}
    assert {
        name: (max(each.weight_elements), each.longest_path, each.communication)
        for name, each in described.items()
    } == {
        "single": (240, 240, 0),
        "sequential": (160, 240, 16),
        "lop": (120, 120, 34),
        "lip": (120, 120, 48),
        "fuse": (120, 120, 22),
        "optimal": (120, 120, 22),
    }
    assert [
        name for name, each in found.items() if each.excess(even(2, memory=900.0))
    ] == ["single"]
    assert described["sequential"].sent_elements == 20
    assert [part.scheme for part in found["optimal"].flow.plan.layers] == [
        "lop",
        "fuse1",
        "fuse2",
        "lop",
    ]
