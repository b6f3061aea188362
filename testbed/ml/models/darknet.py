"""Reader of Darknet's weight files: a header, then the values of every convolution in layer order.

The header is three integers of four bytes, the version, and the number of training images: eight bytes since version
0.2, four before. A normalised convolution stores biases, scales, running means and running variances, another one its
biases; the kernels (output, input, row, column) follow. All values are float32, little-endian.

Darknet normalises every convolution with a leaky activation, which is all of YOLOv2's but the last. In inference,
normalisation is a factor and an offset for each output channel, so the reader folds them into kernels and biases::

    scale (w * x - mean) / (sqrt(variance) + e) + bias = (f w) * x + (bias - f mean),   f = scale / (sqrt(variance) + e)
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
_MOST = 1000
"""Bound of a version's parts. Larger ones are Darknet's mark for transposed kernels, or no version at all."""

FileValues: TypeAlias = "npt.NDArray[np.float32]"


@dataclass(frozen=True)
class Header:
    """The header of a weight file."""

    version: tuple[int, int, int]
    seen: int
    """Images that the network was trained on."""
    size: int
    """Bytes of the header."""


@dataclass(frozen=True)
class Convolution:
    """One convolution of a model as stored in the file."""

    name: str
    """The name of its module in `Model.build`."""
    kernel: tuple[int, int, int, int]
    """(output channels, input channels, rows, columns)."""
    normalised: bool

    @property
    def values(self) -> int:
        """Number of values in the file."""
        per_channel = 4 if self.normalised else 1
        return math.prod(self.kernel) + self.kernel[0] * per_channel


def convolutions(model: Model) -> Iterator[Convolution]:
    """Yield a model's convolutions in order; raises `InputError` for models Darknet would store differently."""
    for index, unit in enumerate(model.units):
        shape = unit.input
        for place, layer in enumerate(unit.layers):
            if isinstance(layer, Conv2d) and layer.groups == 1 and layer.bias:
                kernel = (layer.channels, shape[0], layer.kernel, layer.kernel)
                later = unit.layers[place + 1 :]
                normalised = any(isinstance(each, LeakyReLU) for each in later)
                yield Convolution(f"{index}.{place}", kernel, normalised)
            elif isinstance(layer, Conv2d | Linear) or layer.parameters(shape):
                raise InputError(
                    f"Darknet's files are read for yolov2 only, not for {model.name}",
                    ("model", "weights"),
                )
            shape = layer.output(shape)


def check(path: Path, model: Model) -> Header:
    """Return the header of a file with exactly this model's size; raises `InputError` for other files."""
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
        actual = path.stat().st_size - header.size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    wanted = BYTES_PER_VALUE * sum(each.values for each in convolutions(model))
    if actual != wanted:
        fault = "truncated" if actual < wanted else "too long"
        raise InputError(
            f"{path}: {fault}: {model.name} for {model.classes} classes has "
            f"{wanted:,} bytes of weights, {actual:,} follow the header of {header.size}: download it again, or use "
            "the file of this network and its classes"
        )
    return header


def read(path: Path, model: Model) -> dict[str, torch.Tensor]:
    """Return the weights by the names of `Model.build`, normalisation folded; raises `InputError` for other files."""
    size = check(path, model).size
    state: dict[str, torch.Tensor] = {}
    with path.open("rb") as file:
        file.seek(size)
        for each in convolutions(model):
            kernel, bias = _fold_normalisation(path, file, each)
            state[f"{each.name}.weight"] = torch.from_numpy(kernel)
            state[f"{each.name}.bias"] = torch.from_numpy(bias)
    return state


def _read_header(path: Path, file: IO[bytes]) -> Header:
    """Read the header at the beginning of a file; raises `InputError` for other files."""
    raw = file.read(_VERSION.size)
    # A shorter file has no version, which the check below refuses.
    version = (_MOST, 0, 0)
    if len(raw) == _VERSION.size:
        version = _VERSION.unpack(raw)
    major, minor, revision = version
    if max(major, minor) >= _MOST:
        raise InputError(
            f"{path}: is not a Darknet weights file, which begins with a version such as 0.2.0; use the "
            ".weights file of the network, or the weights.safetensors of a run"
        )
    # Version 0.2 widened the number of images to eight bytes; Darknet compares versions in this way.
    is_wide = 10 * major + minor >= 2
    count = struct.Struct("<Q" if is_wide else "<I")
    raw = file.read(count.size)
    if len(raw) < count.size:
        raise InputError(
            f"{path}: truncated: it ends within its header; download it again"
        )
    (seen,) = count.unpack(raw)
    return Header((major, minor, revision), seen, _VERSION.size + count.size)


def _fold_normalisation(
    path: Path, file: IO[bytes], each: Convolution
) -> tuple[FileValues, FileValues]:
    """Read one convolution; return its kernels and biases without normalisation."""
    channels, *_ = each.kernel
    bias = _read_values(path, file, each, channels)
    if not each.normalised:
        return _read_kernel(path, file, each), bias
    # In the order of the file.
    scale = _read_values(path, file, each, channels)
    mean = _read_values(path, file, each, channels)
    variance = _read_values(path, file, each, channels)
    if (variance < 0).any():
        raise InputError(
            f"{path}: damaged: a variance of layer {each.name} is negative; download it again"
        )
    kernel = _read_kernel(path, file, each)
    # In float64, so that folding rounds once.
    deviation = np.sqrt(variance.astype(np.float64)) + EPSILON
    factor = scale.astype(np.float64) / deviation
    folded_kernel = kernel * factor[:, None, None, None]
    folded_bias = bias - factor * mean
    return folded_kernel.astype(np.float32), folded_bias.astype(np.float32)


def _read_kernel(path: Path, file: IO[bytes], each: Convolution) -> FileValues:
    """Read the kernels of a convolution, (output channels, input channels, rows, columns)."""
    values = _read_values(path, file, each, math.prod(each.kernel))
    return values.reshape(each.kernel)


def _read_values(
    path: Path,
    file: IO[bytes],
    each: Convolution,
    count: int,
) -> FileValues:
    """Read the next values of a file, (count,); raises `InputError` for values that are not finite."""
    content = file.read(BYTES_PER_VALUE * count)
    values = np.frombuffer(content, "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise InputError(
            f"{path}: damaged: layer {each.name} contains values that are not finite numbers; download it again"
        )
    return values
