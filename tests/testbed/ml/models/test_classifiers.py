"""Networks that classify images: their published sizes, and what cannot be made."""

import pytest

from testbed.ml.models import create
from testbed.ml.models.classifiers import BatchNormOptions, MlpOptions, mlp, resnet18
from testbed.ml.models.layers import (
    Residual,
)


def test_sizes_from_the_papers() -> None:
    mlp = create("mlp", {}, (1, 28, 28), 10)
    assert [unit.parameters for unit in mlp.units] == [
        784 * 128 + 128,
        *[128 * 128 + 128] * 3,
        1290,
    ]
    vgg5 = create("vgg5", {"batch_norm": False}, (3, 32, 32), 10)
    assert [unit.output for unit in vgg5.units] == [
        (32, 16, 16),
        (64, 8, 8),
        (4096,),
        (128,),
        (10,),
    ]
    assert vgg5.units[0].forward_flops == 2 * 3 * 9 * 32 * 32 * 32


def test_mobilenetv2_is_the_published_network() -> None:
    whole = create("mobilenetv2", {}, (3, 224, 224), 1000)
    assert (
        whole.parameters == 3_504_872
    )  # the paper: 3.4 M, and 300 M multiplications and additions
    assert whole.forward_flops / 2 == pytest.approx(300e6, rel=0.01)
    assert [unit.output for unit in whole.units[-2:]] == [(1280,), (1000,)]
    assert whole.units[-3].output == (320, 7, 7)
    wide = create("mobilenetv2", {"width": 1.4}, (3, 224, 224), 1000)
    assert wide.forward_flops / 2 == pytest.approx(585e6, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "pixels"), [((1, 28, 28), 4), ((3, 32, 32), 4), ((3, 224, 224), 7)]
)
def test_mobilenetv2_has_a_stem_for_small_images(
    shape: tuple[int, ...], pixels: int
) -> None:
    model = create("mobilenetv2", {}, shape, 10)
    assert len(model.units) == 20
    assert model.units[17].output == (320, pixels, pixels)
    assert model.parameters == 2_223_872 + 10 * 1281 - (3 - shape[0]) * 9 * 32
    assert sum(isinstance(unit.layers[0], Residual) for unit in model.units) == 10


def test_resnet18_has_the_ten_layers_of_pipelearns_table_2() -> None:
    model = create("resnet18", {}, (3, 32, 32), 10)
    assert model.parameters == 11_181_642  # torchvision's resnet18 with ten classes
    assert [unit.output for unit in model.units] == [
        *[(64, 8, 8)] * 3,
        *[(128, 4, 4)] * 2,
        *[(256, 2, 2)] * 2,
        *[(512, 1, 1), (512,)],
        (10,),
    ]
    assert all(isinstance(unit.layers[0], Residual) for unit in model.units[1:-1])
    assert (
        model.cut_bytes(1) * 10_000 * 8 / 10e6 < 203.6
    )  # seconds on 4G, of the paper's whole epoch


@pytest.mark.parametrize(
    ("name", "parameters", "multiplications"),
    # As torchvision states them for its alexnet and vgg16.
    [("alexnet", 61_100_840, 714_188_480), ("vgg16", 138_357_544, 15_470_264_320)],
)
def test_classifiers_have_their_published_sizes(
    name: str, parameters: int, multiplications: int
) -> None:
    model = create(name, {}, (3, 224, 224), 0)
    assert model.parameters == parameters
    assert model.multiplications == multiplications
    assert model.output == (1000,)


def test_the_papers_chain_of_fully_connected_layers() -> None:
    model = create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4)
    assert [unit.weights for unit in model.units] == [32, 128, 64, 16]
    assert model.weights == model.multiplications == 240


def test_a_network_of_one_layer_is_its_output() -> None:
    model = mlp(MlpOptions(hidden=()), (1, 4, 4), 3)
    assert [(unit.name, unit.parameters) for unit in model.units] == [
        ("output", 16 * 3 + 3)
    ]


def test_every_residual_block_halves_the_image_where_it_doubles_the_channels() -> None:
    model = resnet18(BatchNormOptions(batch_norm=False), (3, 64, 64), 10)
    # Two convolutions of 3x3 with biases, and one of 1x1 where sizes change.
    first, second = model.units[3].parameters, model.units[4].parameters
    assert first == (64 * 9 * 128 + 128) + (128 * 9 * 128 + 128) + (64 * 128 + 128)
    assert second == 2 * (128 * 9 * 128 + 128)
