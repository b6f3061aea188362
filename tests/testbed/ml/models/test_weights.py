"""Weights from files: Darknet's format written here by hand, normalisation folded, what is wrong told."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from testbed.common.errors import InputError
from testbed.ml.models import create
from testbed.ml.models import weights as files
from testbed.ml.models.chain import Model, chain
from testbed.ml.models.darknet import check, convolutions, read
from testbed.ml.models.layers import Conv2d, LeakyReLU, MaxPool2d
from testbed.ml.models.weights import facts


def small() -> Model:
    """Return a small network of Darknet's kind, for one class."""
    layers = [
        ("conv0", (Conv2d(4, 3, padding=1), LeakyReLU(0.1))),
        ("pool1", (MaxPool2d(),)),
        ("conv2", (Conv2d(6, 1), LeakyReLU(0.1))),
        ("conv3", (Conv2d(30, 1),)),
    ]
    detector = create("yolov2", {}, (3, 32, 32), 1).detector
    return chain("small", (3, 8, 8), 1, layers, detector=detector)


def draw(sizes: Sequence[tuple[int, int, int]]) -> list[dict[str, np.ndarray]]:
    """Draw the values of convolutions (output channels, input channels, kernel), all but the last normalised."""
    random = np.random.default_rng(5)
    found = []
    for index, (channels, entering, kernel) in enumerate(sizes):
        layer = {"bias": random.normal(size=channels)}
        if index < len(sizes) - 1:
            layer["scale"] = random.normal(size=channels)
            layer["mean"] = random.normal(size=channels)
            layer["variance"] = random.uniform(0.01, 2, size=channels)
        layer["kernel"] = random.normal(size=(channels, entering, kernel, kernel))
        found.append({name: values.astype("<f4") for name, values in layer.items()})
    return found


LAYERS = draw([(4, 3, 3), (6, 4, 1), (30, 6, 1)])


def written(version: tuple[int, int, int] = (0, 2, 0), seen: str = "<Q") -> bytes:
    body = b"".join(values.tobytes() for layer in LAYERS for values in layer.values())
    return struct.pack("<3I", *version) + struct.pack(seen, 32_013_312) + body


def normalised(values: torch.Tensor, layer: dict[str, np.ndarray]) -> torch.Tensor:
    """Compute one convolution as Darknet does: normalise what it makes, then scale it and add the bias."""
    of = {name: torch.from_numpy(found) for name, found in layer.items()}
    values = functional.conv2d(
        values, of["kernel"], padding=of["kernel"].shape[-1] // 2
    )
    if "scale" in of:
        mean, variance, scale = (
            of[name][:, None, None] for name in ("mean", "variance", "scale")
        )
        values = (values - mean) / (variance.sqrt() + 1e-6) * scale
    return values + of["bias"][:, None, None]


@pytest.mark.parametrize(
    ("version", "seen"),
    [((0, 1, 0), "<I"), ((0, 2, 0), "<Q"), ((0, 2, 5), "<Q"), ((1, 0, 0), "<Q")],
)
def test_a_file_computes_what_darknet_computes(
    tmp_path: Path, version: tuple[int, int, int], seen: str
) -> None:
    path = tmp_path / "small.weights"
    path.write_bytes(written(version, seen))
    model = small()
    header = check(path, model)
    assert (header.version, header.seen) == (version, 32_013_312)
    module = model.build(0, len(model.units), seed=0)
    module.load_state_dict(read(path, model))
    images = torch.rand(2, 3, 8, 8)
    values = functional.max_pool2d(
        functional.leaky_relu(normalised(images, LAYERS[0]), 0.1), 2
    )
    values = normalised(
        functional.leaky_relu(normalised(values, LAYERS[1]), 0.1), LAYERS[2]
    )
    with torch.no_grad():
        assert torch.allclose(module(images), values, rtol=1e-4, atol=1e-4)
    assert facts(path, model)["format"] == f"darknet {'.'.join(map(str, version))}"


def test_yolov2_files_have_their_published_sizes() -> None:
    # yolov2.weights, trained on COCO, is 203,934,260 bytes long, its header 16.
    values = sum(
        each.values for each in convolutions(create("yolov2", {}, (3, 608, 608), 0))
    )
    assert values == 50_983_561
    assert 4 * values + 16 == 203_934_260


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not a Darknet weights file"),
        (b"just a text that somebody wrote", "is not a Darknet weights file"),
        (written()[:14], "truncated: it ends within its header"),
        (
            written()[:-4],
            r"truncated: small for 1 classes has 1,528 bytes of weights, 1,524 follow the header of 20",
        ),
        (written() + b"more", "too long"),
        (written((0, 1, 0)), "too long"),
        (written((2000, 2, 0)), "is not a Darknet weights file"),
    ],
)
def test_files_in_other_formats_are_rejected(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "small.weights"
    path.write_bytes(content)
    with pytest.raises(InputError, match=told):
        read(path, small())


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("kernel", np.nan, "no numbers"), ("variance", -1, "negative")],
)
def test_damaged_values_are_refused(
    tmp_path: Path, name: str, value: float, told: str
) -> None:
    path = tmp_path / "small.weights"
    kept = LAYERS[0][name].copy()
    try:
        LAYERS[0][name].flat[0] = value
        path.write_bytes(written())
    finally:
        LAYERS[0][name][:] = kept
    with pytest.raises(InputError, match=told):
        read(path, small())


def test_other_networks_are_not_read_from_darknet(tmp_path: Path) -> None:
    path = tmp_path / "small.weights"
    path.write_bytes(written())
    with pytest.raises(InputError, match="read for yolov2 only, not for vgg16"):
        check(path, create("vgg16", {}, (3, 224, 224), 0))


@pytest.mark.parametrize(
    ("change", "told"),
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
            "no numbers: the training that wrote them has diverged",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], told: str
) -> None:
    from safetensors.torch import save_file

    model = create("cnn", {"channels": [4, 4, 4]}, (1, 8, 8), 10)
    state = model.build(0, len(model.units), 1).state_dict()
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    assert files.read(path, model).keys() == state.keys()
    save_file(
        {
            name: tensor
            for name, tensor in {**state, **change}.items()
            if tensor is not None
        },
        path,
    )
    with pytest.raises(InputError, match=told):
        files.read(path, model)
