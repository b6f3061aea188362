"""The large networks: published sizes, routes across cuts, Darknet's reorganisation, boxes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.detection import Box, Detector, overlap, suppress
from testbed.ml.models.layers import (
    Conv2d,
    Flatten,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Reorganise,
)
from testbed.ml.models.shapes import INPUT
from testbed.ml.models.yolov2 import COCO, ROUTES
from testbed.ml.partition.memory import inference_bytes

YOLO = create("yolov2", {}, (3, 608, 608), 0)
SMALL = create("yolov2", {}, (3, 64, 96), 0)


# ------------------------------------------------------------------------------------------------------ published sizes


def test_yolov2_has_the_sizes_printed_by_darknet() -> None:
    # Darknet: "62.94 BFLOPs" for 608x608; its weight file holds 50,983,561 values, four for each normalised channel.
    assert 2 * YOLO.multiplications == 62_938_253_312
    normalised = sum(
        unit.output[0] for unit in YOLO.units[:-1] if unit.name.startswith("conv")
    )
    assert YOLO.weights + 4 * normalised + 425 == 50_983_561
    assert YOLO.parameters == YOLO.weights + normalised + 425
    assert len(YOLO.units) == 31
    assert YOLO.output == (425, 19, 19)
    named = {unit.name: unit.output for unit in YOLO.units}
    assert [
        named[name]
        for name in ("conv16", "conv24", "route25", "reorg27", "route28", "conv29")
    ] == [
        (512, 38, 38),
        (1024, 19, 19),
        (512, 38, 38),
        (256, 19, 19),
        (1280, 19, 19),
        (1024, 19, 19),
    ]


def test_built_networks_have_the_shapes_of_their_descriptions() -> None:
    for model in (
        create("alexnet", {"hidden": [32, 16]}, (3, 63, 63), 7),
        create("vgg16", {"hidden": [8, 8]}, (3, 32, 32), 5),
    ):
        built = model.build(0, len(model.units), seed=1)
        values = torch.rand(2, *model.input)
        for unit, module in zip(model.units, built, strict=True):
            values = module(values)
            assert values.shape[1:] == unit.output
        assert (
            sum(parameter.numel() for parameter in built.parameters())
            == model.parameters
        )


# --------------------------------------------------------------------------------------------------------------- routes


def plain_yolov2(state: dict[str, torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Run YOLOv2 layer by layer from Darknet's list, apart from the code under test."""
    outputs: list[torch.Tensor] = []
    for index in range(31):
        if index in (1, 3, 7, 11, 17):
            values = functional.max_pool2d(values, 2)
        elif index == 25:
            values = outputs[16]
        elif index == 27:
            values = torch.from_numpy(
                np.stack([darknet_reorganised(sample, 2) for sample in values.numpy()])
            )
        elif index == 28:
            values = torch.cat([outputs[27], outputs[24]], dim=1)
        else:
            kernel = state[f"{index}.0.weight"]
            values = functional.conv2d(
                values, kernel, state[f"{index}.0.bias"], padding=kernel.shape[-1] // 2
            )
            values = values if index == 30 else functional.leaky_relu(values, 0.1)
        outputs.append(values)
    return values


def darknet_reorganised(image: np.ndarray, stride: int) -> np.ndarray:
    """Move values one by one, between the flat positions that Darknet computes."""
    channels, height, width = image.shape
    images = channels // stride**2
    flat, moved = image.reshape(-1), np.empty(image.size, image.dtype)
    for channel, row, column in np.ndindex(channels, height, width):
        image_of, place = channel % images, channel // images
        there = (column * stride + place % stride) + width * stride * (
            (row * stride + place // stride) + height * stride * image_of
        )
        moved[column + width * (row + height * channel)] = flat[there]
    return moved.reshape(channels * stride**2, height // stride, width // stride)


def test_reorganisation_moves_values_as_darknet_does() -> None:
    for shape, stride in (((4, 2, 2), 2), ((64, 6, 4), 2), ((18, 6, 3), 3)):
        image = torch.rand(2, *shape)
        moved = Reorganise(stride).build(shape, torch.Generator())(image)
        assert moved.shape[1:] == Reorganise(stride).output(shape)
        for given_, got in zip(image.numpy(), moved.numpy(), strict=True):
            assert np.array_equal(got, darknet_reorganised(given_, stride))
    with pytest.raises(ValueError, match="pixels that 2 divides"):
        Reorganise(2).output((4, 3, 2))


def test_yolov2_equals_its_layer_list_whole_and_cut_across_routes() -> None:
    images = torch.rand(1, *SMALL.input, generator=torch.Generator().manual_seed(1))
    whole = SMALL.build(0, 31, seed=2)
    with torch.no_grad():
        got = whole(images)
        assert torch.equal(got, plain_yolov2(whole.state_dict(), images))
        for cut, crossing in ((21, [16, 20]), (27, [24, 26])):
            assert [index for index, _ in SMALL.crossing(cut)] == crossing
            front, back = SMALL.build(0, cut, seed=2), SMALL.build(cut, 31, seed=2)
            packed = front(images)
            assert packed.numel() * 4 == SMALL.cut_bytes(cut)
            assert torch.equal(back(packed), got)
            del front, back


def test_tensors_crossing_the_cuts_of_yolov2() -> None:
    crossing = {cut: [index for index, _ in YOLO.crossing(cut)] for cut in range(32)}
    assert crossing[0] == [INPUT]
    assert [crossing[cut] for cut in range(1, 18)] == [
        [cut - 1] for cut in range(1, 18)
    ]
    assert [crossing[cut] for cut in range(18, 26)] == [
        [16, cut - 1] for cut in range(18, 26)
    ]
    assert [crossing[cut] for cut in (26, 27, 28)] == [[24, 25], [24, 26], [24, 27]]
    assert [crossing[cut] for cut in (29, 30, 31)] == [[28], [29], [30]]
    # The early features that wait for the route are in a stage's memory while the units after it run.
    at_18 = YOLO.units[18]
    assert inference_bytes(YOLO, range(18, 19), 1) == at_18.weight_bytes + 4 * (
        512 * 38 * 38 + 512 * 19 * 19 + 2 * 1024 * 19 * 19
    )


@st.composite
def routed(draw: st.DrawFn) -> Model:
    count = draw(st.integers(1, 7))
    routes = {
        index: tuple(
            draw(
                st.lists(
                    st.integers(INPUT, index - 1), min_size=1, max_size=3, unique=True
                )
            )
        )
        for index in range(count)
        if draw(st.booleans())
    }
    units = [
        (f"u{index}", [Conv2d(draw(st.integers(1, 3)), 1), LeakyReLU()])
        for index in range(count)
    ]
    units.append(("end", [Flatten(), Linear(2)]))
    return chain("routed", (2, 2, 2), 2, units, routes)


@settings(max_examples=40, deadline=None)
@given(routed())
def test_segments_of_any_routed_model_compose_to_the_whole_with_their_gradients(
    model: Model,
) -> None:
    last = len(model.units)
    images = torch.rand(3, *model.input, generator=torch.Generator().manual_seed(1))
    whole = model.build(0, last, seed=4)
    expected = whole(images)
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for cut in range(1, last):
        front, back = model.build(0, cut, seed=4), model.build(cut, last, seed=4)
        sent = front(images)
        assert sent.shape[1:].numel() * 4 == model.cut_bytes(cut)
        received = sent.detach().requires_grad_()
        output = back(received)
        assert torch.equal(output, expected)
        output.sum().backward()
        if sent.requires_grad and received.grad is not None:
            sent.backward(received.grad)
        for name, parameter in [*front.named_parameters(), *back.named_parameters()]:
            # What does not reach the output has no gradient in the whole model, and zeros behind a joined cut.
            wanted, got = (
                torch.zeros(()) if each is None else each
                for each in (gradients[name], parameter.grad)
            )
            assert torch.allclose(got, wanted, atol=1e-6), name


def test_impossible_routes_are_rejected() -> None:
    convolutions = [
        ("a", [Conv2d(2, 1)]),
        ("b", [Conv2d(2, 1), MaxPool2d()]),
        ("c", [Flatten(), Linear(2)]),
    ]
    with pytest.raises(ValueError, match="unit 1 reads"):
        chain("later", (2, 2, 2), 2, convolutions, {1: (1,)})
    with pytest.raises(ValueError, match="cannot be joined"):
        chain("odd", (2, 2, 2), 2, convolutions, {2: (0, 1)})
    assert all(YOLO.reads(index) == wanted for index, wanted in ROUTES.items())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("yolov2", (3, 600, 608), "sides that are multiples of 32, such as 3x416x416"),
        ("yolov2", (1, 64, 64), "three channels"),
        ("alexnet", (3, 32, 32), "MaxPool2d of kernel 3 does not fit"),
        ("mlp", (3, 32, 32), "mlp needs data with labels.*or alexnet, vgg16, yolov2"),
    ],
)
def test_unsuitable_inputs_are_rejected(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        create(name, {}, shape, 0)


# ---------------------------------------------------------------------------------------------------------------- boxes


def output_with(
    detector: Detector,
    found: Iterator[tuple[int, int, int, int, float]] | list,
    size: int,
) -> np.ndarray:
    """Make an output in which these (anchor, row, column, label, raw objectness) stand out."""
    values = np.full(
        (len(detector.anchors), 5 + len(detector.labels), size, size), -8.0, np.float32
    )
    values[:, :4] = 0
    for anchor, row, column, label, objectness in found:
        values[anchor, 4, row, column] = objectness
        values[anchor, 5 + label, row, column] = 8
    return values.reshape(-1, size, size)


def test_boxes_are_decoded_from_cells_and_anchors() -> None:
    detector = Detector(((1.0, 2.0), (3.0, 3.0)), ("cat", "dog"))
    (box,) = detector.boxes(output_with(detector, [(0, 2, 1, 1, 3.0)], 4))
    # The middle of cell (1, 2) of 4, one cell wide and two high.
    assert (box.left, box.top, box.right, box.bottom) == pytest.approx(
        (1 / 4, 1.5 / 4, 2 / 4, 3.5 / 4)
    )
    assert box.label == "dog"
    assert box.score == pytest.approx(1 / (1 + np.exp(-3)), rel=1e-6)
    assert detector.boxes(output_with(detector, [(0, 2, 1, 1, -0.1)], 4)) == []
    (edge,) = detector.boxes(output_with(detector, [(1, 0, 0, 0, 3.0)], 4))
    assert (edge.left, edge.top) == (0, 0)


def test_of_overlapping_boxes_of_a_class_the_best_stays() -> None:
    detector = Detector(((3.0, 3.0), (3.0, 2.9)), ("cat", "dog"))
    found = detector.boxes(
        output_with(
            detector,
            [
                (0, 2, 2, 0, 3.0),
                (1, 2, 2, 0, 4.0),
                (0, 2, 3, 1, 2.0),
                (0, 6, 6, 0, 1.0),
            ],
            8,
        )
    )
    assert [box.label for box in found] == ["cat", "dog", "cat"]
    assert [round(box.score, 3) for box in found] == [0.982, 0.881, 0.731]


def test_overlap_is_intersection_over_union() -> None:
    one, other = Box("a", 1, 0, 0, 0.4, 0.4), Box("a", 0.9, 0.2, 0.2, 0.6, 0.6)
    assert overlap(one, other) == pytest.approx(0.04 / 0.28)
    assert overlap(one, Box("a", 1, 0.5, 0, 0.6, 1)) == 0
    assert suppress([one, other], 0.1) == [one]
    assert suppress([one, other], 0.2) == [one, other]


def test_the_labels_are_those_of_coco() -> None:
    assert len(set(COCO)) == 80
    assert (COCO[0], COCO[16], COCO[79]) == ("person", "dog", "toothbrush")
    assert create("yolov2", {}, (3, 32, 32), 3).detector.labels == (
        "class 0",
        "class 1",
        "class 2",
    )
