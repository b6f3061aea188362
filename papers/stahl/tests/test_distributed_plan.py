"""Plans of distributed inference: assignments, memory and traffic for devices of unequal speed and memory."""

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
# Half of the image of 608 pixels and the halo of 59 pixels that 16 layers need.
HALF_AND_HALO = 304 + 1 + 2 + 4 + 4 + 8 + 8 + 16 + 16


def make_devices(*speeds: float, memory: float = 4e9) -> list[DeviceSpec]:
    return [
        DeviceSpec(f"d{index}", speed, memory) for index, speed in enumerate(speeds)
    ]


def equal_devices(count: int, memory: float = 4e9) -> list[DeviceSpec]:
    return make_devices(*[1e9] * count, memory=memory)


def make_flow(
    graph: Graph, devices: list[DeviceSpec], request: PlanSettings
) -> Dataflow:
    return make_dataflow(graph, fitting_plan(graph, devices, request), request)


def summarise(flow: Dataflow) -> tuple[tuple[int, ...], int, int]:
    return (
        weights_by_device(flow),
        longest_path(flow),
        sent_elements(all_transfers(flow)),
    )


def weights_by_device(flow: Dataflow) -> tuple[int, ...]:
    return tuple(count_weights(flow, device) for device in flow.devices)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (plan_settings("single"), ((240, 0), 240, 0)),
        (plan_settings("lop"), ((120, 120), 120, 34)),
        (plan_settings("lip"), ((120, 120), 120, 48)),
        (plan_settings("fuse", fused_pairs=((0, 1), (2, 3))), ((120, 120), 120, 40)),
        (plan_settings("fuse"), ((120, 120), 120, 22)),
        (plan_settings("optimal"), ((120, 120), 120, 22)),
    ],
)
def test_plan_of_four_layer_example_matches_paper(
    method: PlanSettings, expected: tuple[tuple[int, int], int, int]
) -> None:
    assert summarise(make_flow(FOUR_LAYERS, equal_devices(2), method)) == expected


def test_sequential_plan_of_four_layer_example_matches_paper_and_returns_result() -> (
    None
):
    flow = make_flow(FOUR_LAYERS, equal_devices(2), plan_settings("sequential"))
    assert summarise(flow)[:2] == ((160, 80), 240)
    assert all_transfers(flow) == (Transfer(0, 1, 1, (16,)), Transfer(1, 0, 3, (4,)))


@pytest.mark.parametrize("scheme", ["lop", "lip", "fuse", "optimal"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_sent_elements_match_formulas_for_equal_shares(
    scheme: SchemeName, count: int
) -> None:
    graph = graph_of(create("mlp", {"hidden": [64, 128, 32, 64]}, (1, 8, 8), 16))
    flow = make_flow(graph, equal_devices(count), plan_settings(scheme))
    schemes = [part.scheme for part in flow.plan.layers]
    assert sent_elements(all_transfers(flow)) == total_communication(
        graph, schemes, WorkerTotals.equal(count)
    )


@settings(deadline=None)
@given(
    random_chains(),
    st.lists(st.sampled_from([1.0, 2.0, 3.5, 10.0]), min_size=1, max_size=8),
    st.data(),
)
def test_each_scheme_assigns_all_work_exactly_once(
    graph: Graph, speeds: list[float], data: st.DataObject
) -> None:
    scheme = data.draw(st.sampled_from(SCHEMES))
    source = data.draw(st.integers(0, len(speeds) - 1))
    plan = fitting_plan(
        graph, make_devices(*speeds), plan_settings(scheme, source=source)
    )
    assert DistributedPlan.model_validate_json(plan.model_dump_json()) == plan
    for index, (layer, part) in enumerate(zip(graph.layers, plan.layers, strict=True)):
        ranges = part.outputs or part.inputs
        if ranges:
            size = layer.output_channels if part.outputs else layer.input_channels
            assert (ranges[0].first, ranges[-1].last) == (0, size)
            for current, following in pairwise(ranges):
                assert current.last == following.first
        if part.scheme == "fuse2":
            assert part.inputs == plan.layers[index - 1].outputs
    for exchange in ("via-source", "direct"):
        flow = make_dataflow(graph, plan, plan_settings(exchange=exchange))
        assert sum(weights_by_device(flow)) == graph.weights
        parameters = [count_parameters(flow, device) for device in flow.devices]
        assert sum(parameters) == sum(layer.parameters for layer in graph.layers)
        for layer, row in zip(graph.layers, count_multiplications(flow), strict=True):
            assert sum(row) == layer.multiplications


@pytest.mark.parametrize("count", [1, 3, 5, 6, 7])
def test_weights_per_device_are_inverse_to_device_count(count: int) -> None:
    later = YOLO.layers[16:]
    early = sum(layer.weights for layer in YOLO.layers[:16])
    split = sum(layer.weights for layer in later)
    for scheme in ("lop", "fuse", "optimal"):
        flow = make_flow(YOLO, equal_devices(count), plan_settings(scheme))
        devices_with_tiles = {tile.device for tile in flow.plan.tiles}
        for device, stored in enumerate(weights_by_device(flow)):
            # A device with a tile stores the whole weights of the tiled layers.
            expected = split / count
            if device in devices_with_tiles:
                expected += early
            assert stored == pytest.approx(expected, rel=0.02)


def test_weight_memory_matches_table_1_without_tiles() -> None:
    # Table 1: device count and megabytes of weights on a device.
    for count, expected in ((1, 204), (3, 68), (5, 41), (6, 34), (7, 29)):
        method = plan_settings("lop", tiled_layers=0)
        flow = make_flow(YOLO, equal_devices(count), method)
        assert round(4 * max(weights_by_device(flow)) / 1e6) == expected


def test_plan_of_yolov2_on_six_devices_matches_paper() -> None:
    plan = fitting_plan(YOLO, equal_devices(6), plan_settings("fuse"))
    assert plan.tiling is not None
    assert len(plan.tiling.tiles[0].regions) == 17
    assert {tile.device for tile in plan.tiling.tiles} == set(range(6))
    fused = [index for index, part in enumerate(plan.layers) if part.scheme == "fuse1"]
    assert fused == [18, 20, 23, 29]
    # Layers from 16 on send the communication of FUSE2, 67.3 MiB, up to the rounding to whole channels.
    flow = make_dataflow(YOLO, plan, plan_settings())
    later = sent_elements(all_transfers(flow)) - sent_elements(tile_transfers(flow))
    assert 4 * later / 2**20 == pytest.approx(67.26, rel=2e-3)


@pytest.mark.timed
def test_plan_of_yolov2_on_six_devices_takes_under_100_ms() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        fitting_plan(YOLO, equal_devices(6), plan_settings())
        return time.perf_counter() - start

    assert min(seconds() for _ in range(3)) < 0.1


def test_tiles_are_sent_with_halo_and_returned_without() -> None:
    flow = make_flow(YOLO, equal_devices(4), plan_settings(tile_grid=(2, 2), source=1))
    elsewhere = [tile for tile in flow.plan.tiles if tile.device != 1]
    expected = set()
    for tile in elsewhere:
        image = (3 * tile.regions[0].pixels,)
        expected.add(Transfer(1, tile.device, INPUT, image))
        # A quarter of the map of 38x38 pixels with 256 channels returns from layer 15.
        expected.add(Transfer(tile.device, 1, 15, (256 * 19 * 19,)))
    assert set(tile_transfers(flow)) == expected
    # A 3x3 layer needs one more pixel of its input, and each pooling before it doubles the margin.
    assert {tile.regions[0].pixels for tile in elsewhere} == {HALF_AND_HALO**2}


def test_wire_bytes_include_overhead_of_each_message() -> None:
    transfers = all_transfers(
        make_flow(FOUR_LAYERS, equal_devices(2), plan_settings("lop"))
    )
    assert [len(transfer.messages) for transfer in transfers] == [1] * 8
    # A message has 4 bytes for each value of a sample and an envelope of 320 bytes.
    for transfer in transfers:
        values_bytes = 3 * 4 * transfer.elements
        assert transfer.wire_bytes(3) == wire_bytes(values_bytes + 320)
    graph = graph_of(create("mlp", {"hidden": [1000]}, (1, 8, 8), 10))
    options = {"samples": 2, "chunks": 3, "min_chunk_bytes": 1}
    first, *_ = (
        transfer
        for transfer in all_transfers(
            make_flow(graph, equal_devices(2), plan_settings("lop", **options))
        )
        if transfer.value == 0
    )
    assert sorted(first.messages) == [166, 167, 167]
    assert first.wire_bytes(2) == sum(
        wire_bytes(2 * 4 * transfer + 320) for transfer in first.messages
    )


def test_shares_are_proportional_to_speed_unless_equal() -> None:
    graph = graph_of(create("mlp", {"hidden": [120, 60]}, (1, 8, 8), 12))
    plan = fitting_plan(graph, make_devices(3e9, 1e9, 2e9), plan_settings("lop"))
    assert [part.size for part in plan.layers[0].outputs] == [60, 20, 40]
    assert [part.size for part in plan.layers[2].outputs] == [6, 2, 4]
    plan = fitting_plan(
        graph, make_devices(3e9, 1e9, 2e9), plan_settings("lop", shares="equal")
    )
    assert [part.size for part in plan.layers[0].outputs] == [40, 40, 40]


def test_memory_limits_share_of_fast_device() -> None:
    graph = graph_of(create("mlp", {"hidden": [1000, 1000, 1000]}, (1, 8, 8), 10))
    devices = [
        DeviceSpec("small", 8e9, 1e6),
        DeviceSpec("b", 2e9, 1e9),
        DeviceSpec("c", 1e9, 1e9),
    ]
    for scheme in ("lop", "optimal"):
        flow = make_flow(graph, devices, plan_settings(scheme, source=1))
        assert 0.95e6 < memory_needs(flow)[0] <= 1e6
        layer = flow.plan.layers[1]
        sizes = [part.size for part in (layer.outputs or layer.inputs)]
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
def test_plan_fits_memory_or_is_rejected(
    graph: Graph, kinds: list[tuple[float, float]]
) -> None:
    devices = [
        DeviceSpec(f"d{index}", speed, memory)
        for index, (speed, memory) in enumerate(kinds)
    ]
    for scheme in ("lop", "optimal"):
        try:
            flow = make_flow(graph, devices, plan_settings(scheme))
        except InputError:
            continue
        assert all(
            needed <= device.memory
            for needed, device in zip(memory_needs(flow), devices, strict=True)
        )


@pytest.mark.parametrize(("name", "memory"), [("alexnet", 80e6), ("vgg16", 150e6)])
@pytest.mark.parametrize("scheme", ["single", "sequential", "lop", "fuse", "optimal"])
def test_rejected_plan_names_smallest_sufficient_device_count(
    name: str, memory: float, scheme: SchemeName
) -> None:
    graph = graph_of(create(name, {}, (3, 224, 224), 0))
    with pytest.raises(
        InputError, match=r"d\d has \d+ MB of memory, .* needs .* would do"
    ) as caught:
        fitting_plan(graph, equal_devices(2, memory=memory), plan_settings(scheme))
    count = int(str(caught.value).partition(" devices would do")[0].rpartition(" ")[2])
    scheme = "optimal" if "by the scheme optimal" in str(caught.value) else scheme
    assert fitting_plan(
        graph, equal_devices(count, memory=memory), plan_settings(scheme)
    )
    for fewer in range(1, count):
        with pytest.raises(InputError):
            fitting_plan(
                graph, equal_devices(fewer, memory=memory), plan_settings(scheme)
            )


def test_grid_is_refined_if_tiles_exceed_memory() -> None:
    coarse, fine = (
        fitting_plan(YOLO, equal_devices(6, memory=memory), plan_settings()).tiling
        for memory in (80e6, 60e6)
    )
    assert coarse is not None
    assert fine is not None
    assert (fine.rows, fine.columns) == (2 * coarse.rows, 2 * coarse.columns)


def test_activations_beyond_memory_fit_no_device_count() -> None:
    with pytest.raises(
        InputError, match=r"no number of such devices would do.*smaller input"
    ):
        fitting_plan(YOLO, equal_devices(3, memory=10e6), plan_settings())
    assert enough_devices(YOLO, equal_devices(3, memory=10e6), plan_settings()) == 0


def test_peak_activations_match_hand_computed_values() -> None:
    def peaks(scheme: SchemeName, count: int = 2, **options: Any) -> tuple[int, ...]:
        flow = make_flow(
            FOUR_LAYERS, equal_devices(count), plan_settings(scheme, **options)
        )
        return tuple(peak_activations(flow, device) for device in flow.devices)

    # The layer from 8 to 16 starts with 4 of its inputs: it needs 8 sums, 8 outputs and 8 outputs of the other device.
    assert peaks("lop") == (8 + 8 + 16,) * 2
    # The source holds the whole input and two sets of 16 sums before it adds them. The other device peaks at the next
    # layer's input: 8 values in one message, or two messages of 4 that overlap its computation.
    assert peaks("lip") == (8 + 2 * 16, 8)
    assert peaks("lip", chunks=2, min_chunk_bytes=1) == (8 + 2 * 16, 4 + 8)
    # While a device adds its 8 sums, the other may already send sums for 2 of the next layer's 4 outputs.
    assert peaks("lip", exchange="direct") == (4 + 2 * 8 + 2,) * 2
    assert peaks("single", 1) == (24,)
    # The 16 values move in one message, or in two, where the second is added to the result of the first.
    assert peaks("sequential") == (8 + 16, 16 + 4)
    assert peaks("sequential", chunks=2, min_chunk_bytes=1) == (8 + 8, 16 + 4 + 4)


def test_graph_of_model_matches_model() -> None:
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


def test_graph_separates_layers_of_one_unit() -> None:
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


def test_comparison_of_schemes_for_four_layer_example() -> None:
    candidates = {
        candidate.flow.plan.scheme: candidate
        for candidate in compare_schemes(
            FOUR_LAYERS, equal_devices(2, memory=900.0), plan_settings()
        )
    }
    demands = {
        name: plan_demands(candidate.flow) for name, candidate in candidates.items()
    }
    assert {
        name: (
            max(candidate.weight_elements),
            candidate.longest_path,
            candidate.communication,
        )
        for name, candidate in demands.items()
    } == {
        "single": (240, 240, 0),
        "sequential": (160, 240, 16),
        "lop": (120, 120, 34),
        "lip": (120, 120, 48),
        "fuse": (120, 120, 22),
        "optimal": (120, 120, 22),
    }
    assert [
        name
        for name, candidate in candidates.items()
        if candidate.excess(equal_devices(2, memory=900.0))
    ] == ["single"]
    assert demands["sequential"].sent_elements == 20
    assert [part.scheme for part in candidates["optimal"].flow.plan.layers] == [
        "lop",
        "fuse1",
        "fuse2",
        "lop",
    ]
