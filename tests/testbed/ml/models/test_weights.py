"""Weight files: Darknet's format with folded normalisation, safetensors, and damaged files."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.ml.models import create, weights
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.darknet import check, convolutions, read
from testbed.ml.models.layers import Conv2d, LeakyReLU, MaxPool2d
from testbed.ml.models.weights import facts

IMAGES_SEEN = 32_013_312
"""Number of training images in the header, as in yolov2.weights."""
VERSION = (0, 2, 0)


def make_small_yolo() -> Model:
    """Return a small network with YOLOv2's kinds of layers, for one class."""
    layers = [
        ("conv0", (Conv2d(4, 3, padding=1), LeakyReLU(0.1))),
        ("pool1", (MaxPool2d(),)),
        ("conv2", (Conv2d(6, 1), LeakyReLU(0.1))),
        ("conv3", (Conv2d(30, 1),)),
    ]
    detector = create("yolov2", {}, (3, 32, 32), 1).detector
    return chain("small", (3, 8, 8), 1, layers, detector=detector)


def draw_layers(sizes: Sequence[tuple[int, int, int]]) -> list[dict[str, np.ndarray]]:
    """Draw the values of convolutions with sizes (output channels, input channels, kernel).

    All convolutions but the last are normalised; the arrays have the order of the file.
    """
    random = np.random.default_rng(5)
    layers = []
    for index, (channels, inputs, kernel) in enumerate(sizes):
        layer = {"bias": random.normal(size=channels)}
        if index < len(sizes) - 1:
            layer["scale"] = random.normal(size=channels)
            layer["mean"] = random.normal(size=channels)
            layer["variance"] = random.uniform(0.01, 2, size=channels)
        layer["kernel"] = random.normal(size=(channels, inputs, kernel, kernel))
        layers.append({name: values.astype("<f4") for name, values in layer.items()})
    return layers


LAYERS = draw_layers([(4, 3, 3), (6, 4, 1), (30, 6, 1)])


def encode_file(
    version: tuple[int, int, int] = VERSION, seen_format: str = "<Q"
) -> bytes:
    header = struct.pack("<3I", *version) + struct.pack(seen_format, IMAGES_SEEN)
    body = b""
    for layer in LAYERS:
        for values in layer.values():
            body += values.tobytes()
    return header + body


def darknet_convolution(
    inputs: torch.Tensor, layer: dict[str, np.ndarray]
) -> torch.Tensor:
    """Compute a convolution in Darknet's order: products, normalisation, scale, bias."""
    tensors = {name: torch.from_numpy(values) for name, values in layer.items()}
    kernel = tensors["kernel"]
    values = functional.conv2d(inputs, kernel, padding=kernel.shape[-1] // 2)
    if "scale" in tensors:
        mean = tensors["mean"][:, None, None]
        scale = tensors["scale"][:, None, None]
        # Darknet adds its epsilon to the standard deviation, torch to the variance.
        deviation = tensors["variance"][:, None, None].sqrt() + 1e-6
        values = (values - mean) / deviation * scale
    return values + tensors["bias"][:, None, None]


def darknet_forward(images: torch.Tensor) -> torch.Tensor:
    """Compute the outputs of the small network from `LAYERS`, independently of the code under test."""
    values = functional.leaky_relu(darknet_convolution(images, LAYERS[0]), 0.1)
    values = functional.max_pool2d(values, 2)
    values = functional.leaky_relu(darknet_convolution(values, LAYERS[1]), 0.1)
    return darknet_convolution(values, LAYERS[2])


@pytest.mark.parametrize(
    ("version", "seen_format"),
    # The number of images has four bytes before version 0.2, and eight since.
    [((0, 1, 0), "<I"), ((0, 2, 0), "<Q"), ((0, 2, 5), "<Q"), ((1, 0, 0), "<Q")],
)
def test_darknet_file_gives_outputs_of_darknet(
    tmp_path: Path, version: tuple[int, int, int], seen_format: str
) -> None:
    path = tmp_path / "small.weights"
    path.write_bytes(encode_file(version, seen_format))
    model = make_small_yolo()
    header = check(path, model)
    assert header.version == version
    assert header.images_seen == IMAGES_SEEN
    module = model.build(0, len(model.units), seed=0)
    module.load_state_dict(read(path, model))
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        outputs = module(images)
    # Folded normalisation rounds differently from Darknet's order of operations.
    assert torch.allclose(outputs, darknet_forward(images), rtol=1e-4, atol=1e-4)
    assert facts(path, model)["format"] == f"darknet {'.'.join(map(str, version))}"


def test_yolov2_file_has_published_size() -> None:
    model = create("yolov2", {}, (3, 608, 608), 0)
    values = sum(convolution.values for convolution in convolutions(model))
    assert values == 50_983_561
    # yolov2.weights, trained on COCO, has 203,934,260 bytes, of which 16 are its header.
    assert 4 * values + 16 == 203_934_260


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a Darknet weights file"),
        (b"just a text that somebody wrote", "is not a Darknet weights file"),
        (encode_file()[:14], "truncated: it ends within its header"),
        (
            encode_file()[:-4],
            r"truncated: small for 1 classes has 1,528 bytes of weights, 1,524 follow the header of 20",
        ),
        (encode_file() + b"more", "too long"),
        (encode_file((0, 1, 0)), "too long"),
        (encode_file((2000, 2, 0)), "is not a Darknet weights file"),
    ],
    ids=[
        "empty",
        "text",
        "truncated-header",
        "truncated-body",
        "trailing-bytes",
        "old-version-with-long-header",
        "transposed",
    ],
)
def test_file_in_other_format_is_rejected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "small.weights"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(path, make_small_yolo())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("kernel", np.nan, "not finite numbers"), ("variance", -1, "negative")],
)
def test_damaged_values_are_rejected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: float,
    message: str,
) -> None:
    path = tmp_path / "small.weights"
    damaged = LAYERS[0][name].copy()
    damaged.flat[0] = value
    monkeypatch.setitem(LAYERS[0], name, damaged)
    path.write_bytes(encode_file())
    with pytest.raises(InputError, match=message):
        read(path, make_small_yolo())


def test_darknet_file_is_rejected_for_other_network(tmp_path: Path) -> None:
    path = tmp_path / "small.weights"
    path.write_bytes(encode_file())
    with pytest.raises(InputError, match="read for yolov2 only, not for vgg16"):
        check(path, create("vgg16", {}, (3, 224, 224), 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.0.weight": None}, "missing 0.0.weight"),
        ({"9.0.weight": torch.zeros(1)}, "9.0.weight does not belong to the model"),
        (
            {"0.0.weight": torch.zeros(3, 3)},
            r"0.0.weight is torch.float32 of \[3, 3\] instead of torch.float32 of \[",
        ),
        ({"0.0.bias": torch.zeros(4, dtype=torch.float64)}, "torch.float64"),
        (
            {"0.0.bias": torch.full((4,), torch.nan)},
            "not finite numbers: the training that wrote the file diverged",
        ),
    ],
    ids=["missing", "unknown", "shape", "type", "not-a-number"],
)
def test_weights_of_other_model_are_rejected(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    model = create("cnn", {"channels": [4, 4, 4]}, (1, 8, 8), 10)
    state = model.build(0, len(model.units), seed=1).state_dict()
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    assert weights.read(path, model).keys() == state.keys()
    for name, tensor in changes.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, path)
    with pytest.raises(InputError, match=message):
        weights.read(path, model)
