"""Image classifiers: their published sizes and the shapes of their units."""

import pytest

from testbed.ml.models import create
from testbed.ml.models.classifiers import BatchNormOptions, MlpOptions, mlp, resnet18
from testbed.ml.models.layers import Residual


def test_mlp_and_vgg5_have_published_sizes() -> None:
    mlp = create("mlp", {}, (1, 28, 28), 10)
    # Inputs times outputs, and a bias for each output.
    assert [unit.parameters for unit in mlp.units] == [
        784 * 128 + 128,
        *[128 * 128 + 128] * 3,
        128 * 10 + 10,
    ]
    vgg5 = create("vgg5", {"batch_norm": False}, (3, 32, 32), 10)
    assert [unit.output for unit in vgg5.units] == [
        (32, 16, 16),
        (64, 8, 8),
        (4096,),
        (128,),
        (10,),
    ]
    # Two FLOPs for each of 3 x 3x3 inputs of 32 channels with 32x32 pixels.
    assert vgg5.units[0].forward_flops == 2 * 3 * 9 * 32 * 32 * 32


def test_mobilenetv2_has_published_sizes() -> None:
    model = create("mobilenetv2", {}, (3, 224, 224), 1000)
    # The paper has 3.4 million parameters and 300 million multiply-adds, of two FLOPs each.
    assert model.parameters == 3_504_872
    assert model.forward_flops / 2 == pytest.approx(300e6, rel=0.01)
    assert [unit.output for unit in model.units[-2:]] == [(1280,), (1000,)]
    assert model.units[-3].output == (320, 7, 7)
    wide = create("mobilenetv2", {"width": 1.4}, (3, 224, 224), 1000)
    assert wide.forward_flops / 2 == pytest.approx(585e6, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "pixels"), [((1, 28, 28), 4), ((3, 32, 32), 4), ((3, 224, 224), 7)]
)
def test_mobilenetv2_stem_keeps_small_images_large(
    shape: tuple[int, ...], pixels: int
) -> None:
    model = create("mobilenetv2", {}, shape, 10)
    assert len(model.units) == 20
    assert model.units[17].output == (320, pixels, pixels)
    # The output layer has 1280 weights and a bias for each of 10 classes; the stem
    # has 32 kernels of 3x3 for each of at most 3 input channels.
    output_layer = 10 * (1280 + 1)
    missing_kernels = (3 - shape[0]) * 9 * 32
    assert model.parameters == 2_223_872 + output_layer - missing_kernels
    assert sum(isinstance(unit.layers[0], Residual) for unit in model.units) == 10


def test_resnet18_has_ten_layers_of_pipelearn_table_2() -> None:
    model = create("resnet18", {}, (3, 32, 32), 10)
    # torchvision's resnet18 with ten classes has as many parameters.
    assert model.parameters == 11_181_642
    assert [unit.output for unit in model.units] == [
        *[(64, 8, 8)] * 3,
        *[(128, 4, 4)] * 2,
        *[(256, 2, 2)] * 2,
        *[(512, 1, 1), (512,)],
        (10,),
    ]
    assert all(isinstance(unit.layers[0], Residual) for unit in model.units[1:-1])
    # PipeLearn's epoch of 10,000 samples takes 203.6 s on 4G (10 Mbit/s), transfers included.
    epoch_transfer = model.cut_bytes(1) * 10_000 * 8 / 10e6
    assert epoch_transfer < 203.6


@pytest.mark.parametrize(
    ("name", "parameters", "multiplications"),
    # From torchvision's documentation of its alexnet and vgg16.
    [("alexnet", 61_100_840, 714_188_480), ("vgg16", 138_357_544, 15_470_264_320)],
)
def test_alexnet_and_vgg16_have_published_sizes(
    name: str, parameters: int, multiplications: int
) -> None:
    model = create(name, {}, (3, 224, 224), 0)
    assert model.parameters == parameters
    assert model.multiplications == multiplications
    assert model.output == (1000,)


def test_mlp_weights_exclude_biases() -> None:
    model = create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4)
    # Layers of 4, 8, 16, 4 and 4 neurons.
    assert [unit.weights for unit in model.units] == [32, 128, 64, 16]
    assert model.weights == model.multiplications == 240


def test_mlp_without_hidden_layers_has_output_layer_only() -> None:
    model = mlp(MlpOptions(hidden=()), (1, 4, 4), 3)
    (unit,) = model.units
    assert unit.name == "output"
    assert unit.parameters == 16 * 3 + 3


def test_resnet18_block_that_doubles_channels_has_convolution_in_shortcut() -> None:
    model = resnet18(BatchNormOptions(batch_norm=False), (3, 64, 64), 10)
    # Kernels of 3x3 with biases; the shortcut's kernels are 1x1.
    widening = 64 * 9 * 128 + 128
    same_width = 128 * 9 * 128 + 128
    shortcut = 64 * 128 + 128
    assert model.units[3].parameters == widening + same_width + shortcut
    assert model.units[4].parameters == 2 * same_width
