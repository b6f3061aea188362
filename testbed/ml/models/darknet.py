"""Reader of Darknet's weight files: a header, then the values of every convolution in the order of the layers.

The header is three integers of four bytes, the version, and the number of training images: eight bytes since version
0.2, four before. A convolution with batch normalisation stores biases, scales, running means and running variances, any
other convolution its biases; the kernels (output, input, row, column) follow. All values are float32, little-endian.

Darknet normalises every convolution with a leaky activation: all convolutions of YOLOv2 but the last. In inference,
normalisation is a factor f and an offset for each output channel, so the reader folds both into kernels and biases::

    scale (w * x - mean) / (sqrt(variance) + e) + bias = (f w) * x + (bias - f mean),   f = scale / (sqrt(variance) + e)

with the kernel w, the input x, and e = `EPSILON`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from testbed.common.errors import InputError
from testbed.common.lazy import np, npt
from testbed.ml.lazy import torch
from testbed.ml.models.chain import Model
from testbed.ml.models.layers import Conv2d, LeakyReLU, Linear
from testbed.ml.models.shapes import BYTES_PER_VALUE

EPSILON = 1e-6
"""Added to the standard deviation, not to the variance as in torch."""
_VERSION = struct.Struct("<3I")
_VERSION_BOUND = 1000
"""Bound of the parts of a version. Darknet marks files of transposed kernels, which are not supported, by larger ones;
otherwise the file has no version at all."""

FileValues: TypeAlias = "npt.NDArray[np.float32]"


@dataclass(frozen=True)
class Header:
    """The header of a weight file."""

    version: tuple[int, int, int]
    """Major, minor and revision."""
    images_seen: int
    """Number of images that the network was trained with, repetitions included."""
    size: int
    """Bytes of the header."""


@dataclass(frozen=True)
class Convolution:
    """One convolution of a model, as stored in a file."""

    name: str
    """The name of its module in `Model.build`."""
    kernel_shape: tuple[int, int, int, int]
    """(output channels, input channels, rows, columns)."""
    has_normalisation: bool
    """Whether the file has scales, means and variances."""

    @property
    def values(self) -> int:
        """Number of values in the file."""
        output_channels = self.kernel_shape[0]
        # Bias, scale, mean and variance; or the bias alone.
        values_per_channel = 4 if self.has_normalisation else 1
        return math.prod(self.kernel_shape) + output_channels * values_per_channel


def convolutions(model: Model) -> Iterator[Convolution]:
    """Yield a model's convolutions in order; raises `InputError` for models Darknet would store differently."""
    for index, unit in enumerate(model.units):
        shape = unit.input
        for place, layer in enumerate(unit.layers):
            if isinstance(layer, Conv2d) and layer.groups == 1 and layer.bias:
                kernel_shape = (layer.channels, shape[0], layer.kernel, layer.kernel)
                later_layers = unit.layers[place + 1 :]
                has_leaky = any(isinstance(each, LeakyReLU) for each in later_layers)
                yield Convolution(
                    f"{index}.{place}", kernel_shape, has_normalisation=has_leaky
                )
            elif isinstance(layer, Conv2d | Linear) or layer.parameters(shape):
                raise InputError(
                    f"Darknet's files are read for yolov2 only, not for {model.name}",
                    ("model", "weights"),
                )
            shape = layer.output(shape)


def check(path: Path, model: Model) -> Header:
    """Return the header of a file of exactly the model's size; raises `InputError` for other files."""
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
        actual = path.stat().st_size - header.size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    expected = BYTES_PER_VALUE * sum(each.values for each in convolutions(model))
    if actual != expected:
        defect = "truncated" if actual < expected else "too long"
        raise InputError(
            f"{path}: {defect}: {model.name} for {model.classes} classes has "
            f"{expected:,} bytes of weights, {actual:,} follow the header of {header.size}: download it again, or use "
            "the file of this network and its classes"
        )
    return header


def read(path: Path, model: Model) -> dict[str, torch.Tensor]:
    """Return kernels and biases by their names in `Model.build`, with normalisation folded into both.

    Raises `InputError` for other files.
    """
    header = check(path, model)
    state: dict[str, torch.Tensor] = {}
    with path.open("rb") as file:
        file.seek(header.size)
        for convolution in convolutions(model):
            kernel, bias = _read_convolution(path, file, convolution)
            state[f"{convolution.name}.weight"] = torch.from_numpy(kernel)
            state[f"{convolution.name}.bias"] = torch.from_numpy(bias)
    return state


def _read_header(path: Path, file: IO[bytes]) -> Header:
    """Read the header at the beginning of a file; raises `InputError` for other files."""
    version_bytes = file.read(_VERSION.size)
    # A file that is too short fails the check of the version, too.
    version = (_VERSION_BOUND, 0, 0)
    if len(version_bytes) == _VERSION.size:
        version = _VERSION.unpack(version_bytes)
    major, minor, revision = version
    if max(major, minor) >= _VERSION_BOUND:
        raise InputError(
            f"{path}: is not a Darknet weights file, which begins with a version such as 0.2.0; use the "
            ".weights file of the network, or the weights.safetensors of a run"
        )
    # Version 0.2 widened the number of images to eight bytes; Darknet compares versions in this way.
    has_wide_count = 10 * major + minor >= 2
    count = struct.Struct("<Q" if has_wide_count else "<I")
    count_bytes = file.read(count.size)
    if len(count_bytes) < count.size:
        raise InputError(
            f"{path}: truncated: it ends within its header; download it again"
        )
    (images_seen,) = count.unpack(count_bytes)
    size = _VERSION.size + count.size
    return Header((major, minor, revision), images_seen, size)


def _read_convolution(
    path: Path, file: IO[bytes], convolution: Convolution
) -> tuple[FileValues, FileValues]:
    """Read one convolution; return kernels and biases, with normalisation folded into both."""
    # All reads are in the order of the file.
    channels, *_ = convolution.kernel_shape
    bias = _read_values(path, file, convolution, channels)
    if not convolution.has_normalisation:
        return _read_kernel(path, file, convolution), bias
    scale = _read_values(path, file, convolution, channels)
    mean = _read_values(path, file, convolution, channels)
    variance = _read_values(path, file, convolution, channels)
    if (variance < 0).any():
        raise InputError(
            f"{path}: damaged: a variance of layer {convolution.name} is negative; download it again"
        )
    kernel = _read_kernel(path, file, convolution)
    # In float64, so that folding rounds once.
    deviation = np.sqrt(variance.astype(np.float64)) + EPSILON
    factor = scale.astype(np.float64) / deviation
    folded_kernel = kernel * factor[:, None, None, None]
    folded_bias = bias - factor * mean
    return folded_kernel.astype(np.float32), folded_bias.astype(np.float32)


def _read_kernel(path: Path, file: IO[bytes], convolution: Convolution) -> FileValues:
    """Read the kernels of a convolution, (output channels, input channels, rows, columns)."""
    count = math.prod(convolution.kernel_shape)
    values = _read_values(path, file, convolution, count)
    return values.reshape(convolution.kernel_shape)


def _read_values(
    path: Path,
    file: IO[bytes],
    convolution: Convolution,
    count: int,
) -> FileValues:
    """Read the next ``count`` values of a file; raises `InputError` for non-finite values.

    ``path`` and ``convolution`` are named in the error.
    """
    content = file.read(BYTES_PER_VALUE * count)
    values = np.frombuffer(content, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(
            f"{path}: damaged: layer {convolution.name} contains values that are not finite numbers; download it again"
        )
    return values
