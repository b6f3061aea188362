"""Large networks: published sizes, routes across cuts, Darknet's reorganisation, and detected boxes."""

from collections.abc import Sequence

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


def crossing_units(model: Model, cut: int) -> list[int]:
    """Return the indices of the units with an output across a cut."""
    return [index for index, _ in model.crossing_tensors(cut)]


# ------------------------------------------------------------------------------------------------------ published sizes


def test_yolov2_has_sizes_printed_by_darknet() -> None:
    # Darknet prints "62.94 BFLOPs" for 608x608, two FLOPs for each multiplication.
    assert 2 * YOLO.multiplications == 62_938_253_312
    normalised_channels = 0
    for unit in YOLO.units[:-1]:
        if unit.name.startswith("conv"):
            normalised_channels += unit.output[0]
    # The file has bias, scale, mean and variance of each normalised channel, and the
    # 425 biases of the last convolution.
    file_values = YOLO.weights + 4 * normalised_channels + 425
    assert file_values == 50_983_561
    assert YOLO.parameters == YOLO.weights + normalised_channels + 425
    assert len(YOLO.units) == 31
    assert YOLO.output == (425, 19, 19)
    outputs = {unit.name: unit.output for unit in YOLO.units}
    assert outputs["conv16"] == (512, 38, 38)
    assert outputs["conv24"] == (1024, 19, 19)
    assert outputs["route25"] == (512, 38, 38)
    assert outputs["reorg27"] == (256, 19, 19)
    assert outputs["route28"] == (1280, 19, 19)
    assert outputs["conv29"] == (1024, 19, 19)


@pytest.mark.parametrize(
    "model",
    [
        create("alexnet", {"hidden": [32, 16]}, (3, 63, 63), 7),
        create("vgg16", {"hidden": [8, 8]}, (3, 32, 32), 5),
    ],
    ids=lambda model: model.name,
)
def test_built_network_has_described_shapes(model: Model) -> None:
    built = model.build(0, len(model.units), seed=1)
    values = torch.rand(2, *model.input)
    for unit, module in zip(model.units, built, strict=True):
        values = module(values)
        assert values.shape[1:] == unit.output
    parameters = sum(parameter.numel() for parameter in built.parameters())
    assert parameters == model.parameters


# --------------------------------------------------------------------------------------------------------------- routes


def darknet_yolov2(
    state: dict[str, torch.Tensor], images: torch.Tensor
) -> torch.Tensor:
    """Compute YOLOv2 from the layer list of Darknet's yolov2.cfg, independently of the code under test."""
    values = images
    outputs: list[torch.Tensor] = []
    for index in range(31):
        if index in (1, 3, 7, 11, 17):
            values = functional.max_pool2d(values, 2)
        elif index == 25:
            values = outputs[16]
        elif index == 27:
            reorganised = [darknet_reorganised(sample, 2) for sample in values.numpy()]
            values = torch.from_numpy(np.stack(reorganised))
        elif index == 28:
            values = torch.cat([outputs[27], outputs[24]], dim=1)
        else:
            kernel = state[f"{index}.0.weight"]
            bias = state[f"{index}.0.bias"]
            padding = kernel.shape[-1] // 2
            values = functional.conv2d(values, kernel, bias, padding=padding)
            # The last convolution has no activation.
            if index != 30:
                values = functional.leaky_relu(values, 0.1)
        outputs.append(values)
    return values


def darknet_reorganised(image: np.ndarray, stride: int) -> np.ndarray:
    """Move values one by one between the flat positions of Darknet's `reorg_cpu`."""
    channels, height, width = image.shape
    out_channels = channels // stride**2
    flat = image.reshape(-1)
    moved = np.empty(image.size, image.dtype)
    for channel, row, column in np.ndindex(channels, height, width):
        out_channel = channel % out_channels
        offset = channel // out_channels
        source_column = column * stride + offset % stride
        source_row = row * stride + offset // stride
        source = source_column + width * stride * (
            source_row + height * stride * out_channel
        )
        moved[column + width * (row + height * channel)] = flat[source]
    return moved.reshape(channels * stride**2, height // stride, width // stride)


@pytest.mark.parametrize(
    ("shape", "stride"), [((4, 2, 2), 2), ((64, 6, 4), 2), ((18, 6, 3), 3)]
)
def test_reorganise_moves_values_as_darknet(
    shape: tuple[int, int, int], stride: int
) -> None:
    images = torch.rand(2, *shape)
    outputs = Reorganise(stride).build(shape, torch.Generator())(images)
    assert outputs.shape[1:] == Reorganise(stride).output(shape)
    for image, output in zip(images.numpy(), outputs.numpy(), strict=True):
        assert np.array_equal(output, darknet_reorganised(image, stride))


def test_reorganise_rejects_sides_that_stride_does_not_divide() -> None:
    with pytest.raises(ValueError, match="pixels that 2 divides"):
        Reorganise(2).output((4, 3, 2))


def test_yolov2_equals_darknet_layer_list() -> None:
    images = torch.rand(1, *SMALL.input, generator=torch.Generator().manual_seed(1))
    network = SMALL.build(0, 31, seed=2)
    with torch.no_grad():
        expected = darknet_yolov2(network.state_dict(), images)
        assert torch.equal(network(images), expected)


@pytest.mark.parametrize(("cut", "crossing"), [(21, [16, 20]), (27, [24, 26])])
def test_yolov2_cut_across_route_equals_whole(cut: int, crossing: list[int]) -> None:
    images = torch.rand(1, *SMALL.input, generator=torch.Generator().manual_seed(1))
    assert crossing_units(SMALL, cut) == crossing
    with torch.no_grad():
        expected = SMALL.build(0, 31, seed=2)(images)
        front = SMALL.build(0, cut, seed=2)
        back = SMALL.build(cut, 31, seed=2)
        sent = front(images)
        assert sent.numel() * 4 == SMALL.cut_bytes(cut)
        assert torch.equal(back(sent), expected)


def test_route_tensors_cross_all_cuts_up_to_their_reader() -> None:
    assert crossing_units(YOLO, 0) == [INPUT]
    for cut in range(1, 18):
        assert crossing_units(YOLO, cut) == [cut - 1]
    # route25 reads unit 16, and route28 reads unit 24.
    for cut in range(18, 26):
        assert crossing_units(YOLO, cut) == [16, cut - 1]
    for cut in range(26, 29):
        assert crossing_units(YOLO, cut) == [24, cut - 1]
    for cut in range(29, 32):
        assert crossing_units(YOLO, cut) == [cut - 1]


def test_memory_of_stage_includes_waiting_route_tensors() -> None:
    unit = YOLO.units[18]
    # The output of unit 16 waits for route25 in memory, beside the input of unit 18
    # and the outputs of its convolution and LeakyReLU.
    values = 512 * 38 * 38 + 512 * 19 * 19 + 2 * 1024 * 19 * 19
    assert inference_bytes(YOLO, range(18, 19), 1) == unit.weight_bytes + 4 * values


@st.composite
def draw_routed_model(draw: st.DrawFn) -> Model:
    """Draw a chain of convolutions in which some units read up to three earlier units."""
    count = draw(st.integers(1, 7))
    routes = {}
    units = []
    for index in range(count):
        if draw(st.booleans()):
            earlier = st.integers(INPUT, index - 1)
            sources = st.lists(earlier, min_size=1, max_size=3, unique=True)
            routes[index] = tuple(draw(sources))
        channels = draw(st.integers(1, 3))
        units.append((f"u{index}", [Conv2d(channels, 1), LeakyReLU()]))
    units.append(("end", [Flatten(), Linear(2)]))
    return chain("routed", (2, 2, 2), 2, units, routes)


@settings(max_examples=40, deadline=None)
@given(draw_routed_model())
def test_segments_of_routed_model_have_outputs_and_gradients_of_whole(
    model: Model,
) -> None:
    last = len(model.units)
    images = torch.rand(3, *model.input, generator=torch.Generator().manual_seed(1))
    network = model.build(0, last, seed=4)
    expected = network(images)
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    for cut in range(1, last):
        front = model.build(0, cut, seed=4)
        back = model.build(cut, last, seed=4)
        sent = front(images)
        assert sent.shape[1:].numel() * 4 == model.cut_bytes(cut)
        received = sent.detach().requires_grad_()
        output = back(received)
        assert torch.equal(output, expected)
        output.sum().backward()
        if sent.requires_grad and received.grad is not None:
            sent.backward(received.grad)
        for name, parameter in [*front.named_parameters(), *back.named_parameters()]:
            # Unused units have no gradient in the whole model, and zeros behind a joined cut.
            actual = gradient_or_zero(parameter.grad)
            wanted_gradient = gradient_or_zero(gradients[name])
            assert torch.allclose(actual, wanted_gradient, atol=1e-6), name


def gradient_or_zero(gradient: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(()) if gradient is None else gradient


def test_impossible_routes_are_rejected() -> None:
    units = [
        ("a", [Conv2d(2, 1)]),
        ("b", [Conv2d(2, 1), MaxPool2d()]),
        ("c", [Flatten(), Linear(2)]),
    ]
    with pytest.raises(ValueError, match="unit 1 reads"):
        chain("later", (2, 2, 2), 2, units, {1: (1,)})
    # MaxPool2d halves the sides of the second tensor.
    with pytest.raises(ValueError, match="cannot be joined"):
        chain("odd", (2, 2, 2), 2, units, {2: (0, 1)})


def test_yolov2_reads_its_routes() -> None:
    for index, sources in ROUTES.items():
        assert YOLO.reads(index) == sources


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("yolov2", (3, 600, 608), "sides that are multiples of 32, such as 3x416x416"),
        ("yolov2", (1, 64, 64), "three channels"),
        ("alexnet", (3, 32, 32), "MaxPool2d of kernel 3 does not fit"),
        ("mlp", (3, 32, 32), "mlp needs data with labels.*or alexnet, vgg16, yolov2"),
    ],
)
def test_unsuitable_image_size_is_rejected(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        create(name, {}, shape, 0)


# ---------------------------------------------------------------------------------------------------------------- boxes


def make_output(
    detector: Detector,
    detections: Sequence[tuple[int, int, int, int, float]],
    size: int,
) -> np.ndarray:
    """Return a network output of ``size`` x ``size`` cells with the given detections.

    A detection is (anchor, row, column, label, objectness before the sigmoid).
    """
    channels = 5 + len(detector.labels)
    # The sigmoid of -8 is nearly zero.
    values = np.full((len(detector.anchors), channels, size, size), -8.0, np.float32)
    values[:, :4] = 0
    for anchor, row, column, label, objectness in detections:
        values[anchor, 4, row, column] = objectness
        values[anchor, 5 + label, row, column] = 8
    return values.reshape(-1, size, size)


def test_boxes_are_decoded_from_cells_and_anchors() -> None:
    detector = Detector(((1.0, 2.0), (3.0, 3.0)), ("cat", "dog"))
    (box,) = detector.boxes(make_output(detector, [(0, 2, 1, 1, 3.0)], 4))
    # The centre of column 1 and row 2 of 4 cells; the anchor is one cell wide and two high.
    corners = (box.left, box.top, box.right, box.bottom)
    assert corners == pytest.approx((1 / 4, 1.5 / 4, 2 / 4, 3.5 / 4))
    assert box.label == "dog"
    assert box.score == pytest.approx(1 / (1 + np.exp(-3)), rel=1e-6)


def test_boxes_below_score_threshold_are_dropped() -> None:
    detector = Detector(((1.0, 2.0), (3.0, 3.0)), ("cat", "dog"))
    # The sigmoid of -0.1 is below the threshold of 0.5.
    output = make_output(detector, [(0, 2, 1, 1, -0.1)], 4)
    assert detector.boxes(output) == []


def test_boxes_end_at_edge_of_image() -> None:
    detector = Detector(((1.0, 2.0), (3.0, 3.0)), ("cat", "dog"))
    (box,) = detector.boxes(make_output(detector, [(1, 0, 0, 0, 3.0)], 4))
    assert (box.left, box.top) == (0, 0)


def test_overlapping_boxes_of_a_class_are_reduced_to_best() -> None:
    detector = Detector(((3.0, 3.0), (3.0, 2.9)), ("cat", "dog"))
    detections = [
        # Two anchors in the same cell; the dog overlaps but has another class.
        (0, 2, 2, 0, 3.0),
        (1, 2, 2, 0, 4.0),
        (0, 2, 3, 1, 2.0),
        (0, 6, 6, 0, 1.0),
    ]
    boxes = detector.boxes(make_output(detector, detections, 8))
    assert [box.label for box in boxes] == ["cat", "dog", "cat"]
    # Sigmoids of 4, 2 and 1.
    assert [round(box.score, 3) for box in boxes] == [0.982, 0.881, 0.731]


def test_overlap_is_intersection_over_union() -> None:
    first = Box("a", 1, 0, 0, 0.4, 0.4)
    second = Box("a", 0.9, 0.2, 0.2, 0.6, 0.6)
    # Two squares of 0.16 share 0.04.
    assert overlap(first, second) == pytest.approx(0.04 / 0.28)
    assert overlap(first, Box("a", 1, 0.5, 0, 0.6, 1)) == 0
    assert suppress([first, second], 0.1) == [first]
    assert suppress([first, second], 0.2) == [first, second]


def test_yolov2_labels_are_coco_classes() -> None:
    assert len(set(COCO)) == 80
    assert (COCO[0], COCO[16], COCO[79]) == ("person", "dog", "toothbrush")
    detector = create("yolov2", {}, (3, 32, 32), 3).detector
    assert detector.labels == ("class 0", "class 1", "class 2")
