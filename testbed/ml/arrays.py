"""Tensors of torch in messages: the functions that `testbed.wire.arrays` requires from every array library.

The core imports this module only where torch is used, and handles tensors only by these functions.

A meta tensor has a shape and a type, but no values. Runs for timing alone compute with meta tensors, and their messages
have the same sizes as those of other runs. `Raw` is a serialized tensor: name, type, shape and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from testbed.ml.lazy import torch
from testbed.wire.tensors import NAMES, Raw, TensorError, type_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def to_raw(tensors: Mapping[str, torch.Tensor]) -> list[Raw]:
    """Serialize tensors of any shape, without copying contiguous tensors on the CPU.

    >>> to_raw({"weight": torch.zeros(2, 3)})[0].shape
    (2, 3)
    """
    result = []
    for name, tensor in tensors.items():
        dtype = type_of(name, tensor)
        values = tensor.detach()
        if tensor.is_meta:
            # The message needs as many bytes as with values, so it has zeros. `zeros_like` would be an operation on a
            # meta tensor, for which torch imports sympy; the import takes each device a second or more.
            values = torch.zeros(tensor.shape, dtype=tensor.dtype)
        flat = values.to("cpu").contiguous().reshape(-1)
        # A view as bytes, since numpy lacks some of torch's types, such as bfloat16.
        data = flat.view(torch.uint8).numpy().data
        result.append(Raw(name, dtype, tuple(tensor.shape), data))
    return result


def from_raw(raws: Sequence[Raw]) -> dict[str, torch.Tensor]:
    """Return tensors sharing the memory of a writable buffer; a read-only buffer is copied.

    Raises TensorError for shapes that torch cannot have.

    >>> from_raw(to_raw({"bias": torch.ones(2)}))
    {'bias': tensor([1., 1.])}
    """
    result = {}
    for raw in raws:
        dtype = getattr(torch, NAMES[raw.dtype])
        # `frombuffer` rejects an empty buffer.
        if raw.data.nbytes == 0:
            try:
                result[raw.name] = torch.empty(raw.shape, dtype=dtype)
            except RuntimeError as error:
                # One axis has size 0, and the others are so large that the strides exceed 64 bits.
                raise TensorError(
                    f"tensor '{raw.name}': its shape is too large"
                ) from error
            continue
        # `frombuffer` warns of read-only memory.
        data = bytearray(raw.data) if raw.data.readonly else raw.data
        flat = torch.frombuffer(data, dtype=dtype)
        result[raw.name] = flat.reshape(raw.shape)
    return result


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of any shape, detached from the graph of gradients."""
    return tensor.detach().clone()


def mask(
    tensor: torch.Tensor, gaps: npt.NDArray[np.bool_]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor with lost values set to zero, and a tensor that is true where values were lost.

    ``gaps`` has the shape of the tensor and is true where values were lost. A meta tensor has no values to set.

    >>> import numpy as np
    >>> mask(torch.tensor([1.0, 2.0]), np.array([False, True]))
    (tensor([1., 0.]), tensor([False,  True]))
    """
    missing = torch.from_numpy(gaps)
    filled = tensor if tensor.is_meta else tensor.masked_fill(missing, 0)
    return filled, missing


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape and type of a tensor.

    >>> without_values(torch.zeros(2, 3)).device.type
    'meta'
    """
    return tensor.to("meta")


def empty(raw: Raw) -> torch.Tensor:
    """Return a meta tensor with the shape and type of a serialized one.

    >>> empty(to_raw({"bias": torch.ones(2)})[0]).shape
    torch.Size([2])
    """
    dtype = getattr(torch, NAMES[raw.dtype])
    return torch.empty(raw.shape, dtype=dtype, device="meta")
