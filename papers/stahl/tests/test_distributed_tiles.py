"""Tilings of fused layers: regions and multiplications of tiles, against torch on each tile."""

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
def early_layers(draw: st.DrawFn) -> list[GraphLayer]:
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


def compute_layer(
    layer: GraphLayer,
    kernels: torch.Tensor | None,
    values: torch.Tensor,
    pad: tuple[int, ...],
) -> torch.Tensor:
    if layer.is_channelwise:
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
@given(early_layers(), st.data())
def test_separately_computed_tiles_equal_whole_map(
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
    expected_map = image
    for layer, kernel in zip(layers, kernels, strict=True):
        expected_map = compute_layer(
            layer, kernel, expected_map, (window(layer).padding,) * 4
        )
    tiling = make_tiling(layers, rows, columns, [1.0], 0)
    assert len(tiling.tiles) == rows * columns
    covered = torch.zeros(height, width)
    for tile in tiling.tiles:
        values = cut(image, tile.regions[0])
        computed = 0
        for layer, kernel, out in zip(layers, kernels, tile.regions[1:], strict=True):
            values = compute_layer(layer, kernel, values, tile_padding(layer, out))
            assert values.shape[1:] == (out.bottom - out.top, out.right - out.left)
            computed += (
                values.numel()
                * window(layer).kernel ** 2
                * layer.input[0]
                * bool(layer.weights)
            )
        torch.testing.assert_close(
            values, cut(expected_map, tile.regions[-1]), rtol=1e-12, atol=1e-12
        )
        assert sum(tile_multiplications(layers, tile.regions[1:])) == computed
        cut(covered[None], tile.regions[-1]).add_(1)
    assert torch.equal(covered, torch.ones(height, width))


def test_halo_matches_hand_computed_example() -> None:
    # A 3x3 layer on 8x8 pixels, pooling to 4x4 and another 3x3 layer, in a grid of 2x1 tiles.
    first = convolution_layer("a", (1, 8, 8), 1, 3, -1)
    layers = [
        first,
        pooling_layer("b", first.output, 0),
        convolution_layer("c", (1, 4, 4), 1, 3, 1),
    ]
    upper, lower = make_tiling(layers, 2, 1, [1.0, 1.0], 0).tiles
    # Two rows of the last layer need three rows of pooling, hence six of the first layer and seven of the image.
    assert upper.regions == ((0, 7, 0, 8), (0, 6, 0, 8), (0, 3, 0, 4), (0, 2, 0, 4))
    assert lower.regions == ((1, 8, 0, 8), (2, 8, 0, 8), (1, 4, 0, 4), (2, 4, 0, 4))
    assert tile_padding(layers[2], upper.regions[3]) == (1, 1, 1, 0)
    assert tile_padding(layers[2], lower.regions[3]) == (1, 1, 0, 1)
    assert tile_multiplications(layers, upper.regions[1:]) == [9 * 48, 0, 9 * 8]
    assert (
        redundant_multiplications(layers, [upper.regions[1:], lower.regions[1:]])
        == 9 * 2 * 16
    )
    (single,) = make_tiling(layers, 1, 1, [1.0], 0).tiles
    assert redundant_multiplications(layers, [single.regions[1:]]) == 0


def test_number_of_feature_dominated_layers_of_known_networks() -> None:
    assert feature_dominated_layers(YOLO) == 16
    assert feature_dominated_layers(yolov2(416)) < 16
    vgg = graph_of(create("vgg16", {}, (3, 224, 224), 0))
    assert vgg.layers[feature_dominated_layers(vgg) - 1].is_channelwise
    assert feature_dominated_layers(graph_of(create("mlp", {}, (1, 8, 8), 10))) == 0


@pytest.mark.parametrize(("count", "largest"), [(18, 17), (25, 17), (40, 17)])
def test_layers_that_cannot_be_tiled_are_rejected(count: int, largest: int) -> None:
    with pytest.raises(InputError, match=rf"first {count} layers .* use {largest}"):
        check_tileable(YOLO, count)
    for valid in range(18):
        check_tileable(YOLO, valid)


def test_layer_with_padding_as_large_as_kernel_is_not_tiled() -> None:
    # A tile at the border would consist of padding only.
    padded = GraphLayer("padded", (Conv2d(8, 1, 1, 1),), (3, 6, 6), (-1,))
    graph = Graph(
        "padded", (padded, convolution_layer("after", padded.output, 8, 3, 0))
    )
    assert feature_dominated_layers(graph) == 0
    with pytest.raises(InputError, match=r"less padding than their kernels.* use 0"):
        check_tileable(graph, 1)


def test_tiles_are_assigned_by_speed_and_then_to_source() -> None:
    layers = YOLO.layers[:12]
    tiling = make_tiling(layers, 3, 3, [2.0, 1.0], 1)
    loads = [
        sum(
            sum(tile_multiplications(layers, tile.regions[1:]))
            for tile in tiling.tiles
            if tile.device == n
        )
        for n in (0, 1)
    ]
    assert 1.5 < loads[0] / loads[1] < 2.5
    assert [tile.device for tile in make_tiling(layers, 1, 1, [1.0] * 4, 2).tiles] == [
        2
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8])
def test_best_tiling_is_no_slower_than_row_or_column(
    count: int,
) -> None:
    layers = YOLO.layers[:16]

    def busiest(rows: int, columns: int) -> int:
        tiling = make_tiling(layers, rows, columns, [1.0] * count, 0)
        loads = [0] * count
        for tile in tiling.tiles:
            loads[tile.device] += sum(tile_multiplications(layers, tile.regions[1:]))
        return max(loads)

    best = best_tiling(layers, [1.0] * count, 0)
    assert busiest(best.rows, best.columns) <= min(
        busiest(count, 1), busiest(1, count), busiest(1, 1)
    )


def test_grid_finer_than_map_is_rejected() -> None:
    with pytest.raises(
        InputError,
        match=r"method.tile_grid: a map of 38x38 pixels cannot be cut into 39 columns: use 1 to 38",
    ):
        make_tiling(YOLO.layers[:16], 1, 39, [1.0], 0)


def test_layer_with_later_consumer_ends_tiled_layers() -> None:
    shape = (2, 8, 8)
    layers = [
        convolution_layer(f"c{index}", shape, 2, 3, index - 1) for index in range(3)
    ]
    joined = GraphLayer("join", (), (4, 8, 8), (2, 1))
    graph = Graph("n", (*layers, joined))
    with pytest.raises(InputError, match="use 2"):
        check_tileable(graph, 3)
    assert feature_dominated_layers(graph) == 2
    # Tiles leave no whole image on any device, so a later layer cannot read it.
    again = Graph("n", (*layers, GraphLayer("again", (), (4, 8, 8), (2, -1))))
    assert feature_dominated_layers(again) == 0
    with pytest.raises(InputError, match="use 0"):
        check_tileable(again, 3)
