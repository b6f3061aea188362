"""Fused tiles: what each needs and computes, against torch on each tile alone; the price of the halo; refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.models.graph import Graph, GraphLayer, graph_of
from testbed.ml.models.layers import Conv2d, PixelWindow
from testbed_stahl.plan import Region
from testbed_stahl.tiles import (
    best_tiling,
    check_tileable,
    feature_dominated_layers,
    make_tiling,
    redundant_multiplications,
    tile_multiplications,
    tile_padding,
)
from tests.helpers.graphs import convolution_layer, pooling_layer, yolov2

YOLO = yolov2()


@st.composite
def early(draw: st.DrawFn) -> list[GraphLayer]:
    shape: tuple[int, ...] = (2, draw(st.integers(6, 21)), draw(st.integers(6, 21)))
    layers: list[GraphLayer] = []
    for index in range(draw(st.integers(1, 4))):
        if min(shape[1:]) >= 4 and draw(st.booleans()):
            layers.append(pooling_layer(f"p{index}", shape, index - 1))
        else:
            kernel, stride = draw(
                st.sampled_from([(1, 1), (3, 1), (3, 2), (5, 1), (5, 3)])
            )
            layers.append(
                convolution_layer(
                    f"c{index}",
                    shape,
                    draw(st.integers(1, 3)),
                    kernel,
                    index - 1,
                    stride,
                )
            )
        shape = layers[-1].output
    return layers


def window(layer: GraphLayer) -> PixelWindow:
    assert layer.window is not None
    return layer.window


def compute(
    layer: GraphLayer,
    kernels: torch.Tensor | None,
    values: torch.Tensor,
    pad: tuple[int, ...],
) -> torch.Tensor:
    if layer.by_channel:
        assert pad == (0, 0, 0, 0)
        return functional.max_pool2d(values, window(layer).kernel, window(layer).stride)
    assert kernels is not None
    return functional.relu(
        functional.conv2d(
            functional.pad(values, pad), kernels, stride=window(layer).stride
        )
    )


def cut(values: torch.Tensor, region: Region) -> torch.Tensor:
    return values[:, region.top : region.bottom, region.left : region.right]


@settings(max_examples=60, deadline=None)
@given(early(), st.data())
def test_tiles_computed_each_alone_make_up_the_whole(
    layers: list[GraphLayer], data: st.DataObject
) -> None:
    _, height, width = layers[-1].output
    rows, columns = (
        data.draw(st.integers(1, min(4, height))),
        data.draw(st.integers(1, min(4, width))),
    )
    draws = torch.Generator().manual_seed(1)
    kernels = [
        torch.rand(
            *layer.sequence[0].weight_shape(layer.input),
            generator=draws,
            dtype=torch.float64,
        )
        if layer.weights
        else None
        for layer in layers
    ]
    image = torch.rand(*layers[0].input, generator=draws, dtype=torch.float64)
    whole = image
    for layer, kernel in zip(layers, kernels, strict=True):
        whole = compute(layer, kernel, whole, (window(layer).padding,) * 4)
    tiling = make_tiling(layers, rows, columns, [1.0], 0)
    assert len(tiling.tiles) == rows * columns
    covered = torch.zeros(height, width)
    for each in tiling.tiles:
        values = cut(image, each.regions[0])
        computed = 0
        for layer, kernel, out in zip(layers, kernels, each.regions[1:], strict=True):
            values = compute(layer, kernel, values, tile_padding(layer, out))
            assert values.shape[1:] == (out.bottom - out.top, out.right - out.left)
            computed += (
                values.numel()
                * window(layer).kernel ** 2
                * layer.input[0]
                * bool(layer.weights)
            )
        torch.testing.assert_close(
            values, cut(whole, each.regions[-1]), rtol=1e-12, atol=1e-12
        )
        assert sum(tile_multiplications(layers, each.regions[1:])) == computed
        cut(covered[None], each.regions[-1]).add_(1)
    assert torch.equal(covered, torch.ones(height, width))


def test_halo_of_a_small_example_by_hand() -> None:
    # 3x3 on 8x8, pooling to 4x4, 3x3 on that: a 2x1 grid.
    first = convolution_layer("a", (1, 8, 8), 1, 3, -1)
    layers = [
        first,
        pooling_layer("b", first.output, 0),
        convolution_layer("c", (1, 4, 4), 1, 3, 1),
    ]
    upper, lower = make_tiling(layers, 2, 1, [1.0, 1.0], 0).tiles
    # Two rows of the last layer need three of pooling, so six of the first, so seven of the image.
    assert upper.regions == ((0, 7, 0, 8), (0, 6, 0, 8), (0, 3, 0, 4), (0, 2, 0, 4))
    assert lower.regions == ((1, 8, 0, 8), (2, 8, 0, 8), (1, 4, 0, 4), (2, 4, 0, 4))
    assert tile_padding(layers[2], upper.regions[3]) == (1, 1, 1, 0)
    assert tile_padding(layers[2], lower.regions[3]) == (1, 1, 0, 1)
    assert tile_multiplications(layers, upper.regions[1:]) == [9 * 48, 0, 9 * 8]
    assert (
        redundant_multiplications(layers, [upper.regions[1:], lower.regions[1:]])
        == 9 * 2 * 16
    )
    (one,) = make_tiling(layers, 1, 1, [1.0], 0).tiles
    assert redundant_multiplications(layers, [one.regions[1:]]) == 0


def test_the_early_layers_of_the_networks() -> None:
    assert feature_dominated_layers(YOLO) == 16
    assert feature_dominated_layers(yolov2(416)) < 16
    vgg = graph_of(create("vgg16", {}, (3, 224, 224), 0))
    assert vgg.layers[feature_dominated_layers(vgg) - 1].by_channel
    assert feature_dominated_layers(graph_of(create("mlp", {}, (1, 8, 8), 10))) == 0


@pytest.mark.parametrize(("count", "instead"), [(18, 17), (25, 17), (40, 17)])
def test_layers_that_cannot_be_tiled_are_refused(count: int, instead: int) -> None:
    with pytest.raises(InputError, match=rf"first {count} layers .* use {instead}"):
        check_tileable(YOLO, count)
    for able in range(18):
        check_tileable(YOLO, able)


def test_padding_as_large_as_the_kernel_is_not_tiled() -> None:
    """A tile at the border would see nothing of the map."""
    padded = GraphLayer("padded", (Conv2d(8, 1, 1, 1),), (3, 6, 6), (-1,))
    graph = Graph(
        "padded", (padded, convolution_layer("after", padded.output, 8, 3, 0))
    )
    assert feature_dominated_layers(graph) == 0
    with pytest.raises(InputError, match=r"less padding than their kernels.* use 0"):
        check_tileable(graph, 1)


def test_tiles_go_to_devices_by_speed_and_of_equals_to_the_source() -> None:
    layers = YOLO.layers[:12]
    tiling = make_tiling(layers, 3, 3, [2.0, 1.0], 1)
    loads = [
        sum(
            sum(tile_multiplications(layers, each.regions[1:]))
            for each in tiling.tiles
            if each.device == n
        )
        for n in (0, 1)
    ]
    assert 1.5 < loads[0] / loads[1] < 2.5
    assert [each.device for each in make_tiling(layers, 1, 1, [1.0] * 4, 2).tiles] == [
        2
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8])
def test_the_best_tiling_is_no_slower_than_a_row_or_a_column_of_tiles(
    count: int,
) -> None:
    layers = YOLO.layers[:16]

    def busiest(rows: int, columns: int) -> int:
        tiling = make_tiling(layers, rows, columns, [1.0] * count, 0)
        loads = [0] * count
        for each in tiling.tiles:
            loads[each.device] += sum(tile_multiplications(layers, each.regions[1:]))
        return max(loads)

    best = best_tiling(layers, [1.0] * count, 0)
    assert busiest(best.rows, best.columns) <= min(
        busiest(count, 1), busiest(1, count), busiest(1, 1)
    )


def test_grids_finer_than_the_map_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"method.tile_grid: a map of 38x38 pixels cannot be cut into 39 columns: use 1 to 38",
    ):
        make_tiling(YOLO.layers[:16], 1, 39, [1.0], 0)


def test_a_layer_whose_inside_is_asked_for_later_ends_the_early_ones() -> None:
    shape = (2, 8, 8)
    layers = [
        convolution_layer(f"c{index}", shape, 2, 3, index - 1) for index in range(3)
    ]
    joined = GraphLayer("join", (), (4, 8, 8), (2, 1))
    graph = Graph("n", (*layers, joined))
    with pytest.raises(InputError, match="use 2"):
        check_tileable(graph, 3)
    assert feature_dominated_layers(graph) == 2
    # Tiles leave the image nowhere as a whole.
    again = Graph("n", (*layers, GraphLayer("again", (), (4, 8, 8), (2, -1))))
    assert feature_dominated_layers(again) == 0
    with pytest.raises(InputError, match="use 0"):
        check_tileable(again, 3)
