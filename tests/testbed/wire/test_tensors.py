"""The safetensors reader and writer, compared with the safetensors library, and the encoding of data sets."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.arrays import from_raw, to_raw
from testbed.ml.data.dataset import Dataset, pack, unpack
from testbed.wire.tensors import (
    HEADER_LIMIT,
    TensorError,
    from_numpy,
    read,
    to_numpy,
    write,
)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    result = {}
    for name in draw(st.lists(st.text(max_size=8), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        # Every type, bool among them, has the values 0 and 1.
        values = torch.randint(0, 2, shape, generator=generator)
        result[name] = values.to(draw(st.sampled_from(DTYPES)))
    return result


def assert_same_tensors(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        assert torch.equal(actual[name], tensor)


def write_body(values: dict[str, torch.Tensor]) -> bytes:
    return b"".join(write(to_raw(values)))


def read_tensors(body: bytes | bytearray) -> dict[str, torch.Tensor]:
    raw_tensors, _ = read(body)
    return from_raw(raw_tensors)


@given(tensors())
def test_written_tensors_are_read_back_in_order(
    values: dict[str, torch.Tensor],
) -> None:
    decoded = read_tensors(bytearray(write_body(values)))
    assert list(decoded) == list(values)
    assert_same_tensors(decoded, values)


@given(tensors())
def test_library_reads_written_body(values: dict[str, torch.Tensor]) -> None:
    assert_same_tensors(safetensors.torch.load(write_body(values)), values)


@given(tensors())
def test_body_written_by_library_is_read(values: dict[str, torch.Tensor]) -> None:
    assert_same_tensors(read_tensors(safetensors.torch.save(values)), values)


def test_strided_and_shared_tensors_are_written() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    values = {
        "transposed": base.T,
        "row": base[1],
        "again": base,
        "expanded": torch.ones(1).expand(5),
    }
    assert_same_tensors(read_tensors(bytearray(write_body(values))), values)


def test_read_tensor_requires_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)
    decoded = read_tensors(bytearray(write_body({"w": weight * 2})))
    assert not decoded["w"].requires_grad


def test_tensor_is_view_of_writable_buffer() -> None:
    data = bytearray(write_body({"x": torch.zeros(4)}))
    tensor = read_tensors(data)["x"]
    # The last value has the last four bytes of the body.
    data[-4:] = np.float32(7).tobytes()
    assert tensor.tolist() == [0, 0, 0, 7]


def test_tensor_is_copy_of_readonly_buffer() -> None:
    data = write_body({"x": torch.tensor([0.0, 0.0, 0.0, 7.0])})
    tensor = read_tensors(data)["x"]
    tensor[0] = 1
    assert np.frombuffer(data[-16:], np.float32).tolist() == [0, 0, 0, 7]


def test_values_are_aligned_for_any_offset_of_body() -> None:
    # Two periods of the alignment of 64 bytes.
    for offset in range(130):
        length, header, *_ = write(to_raw({"x": torch.zeros(4)}), offset=offset)
        assert (offset + len(length) + len(header)) % 64 == 0


def test_unsupported_dtype_is_refused_with_tensor_name() -> None:
    with pytest.raises(
        TensorError, match=r"'z' has unsupported dtype torch\.complex64"
    ):
        to_raw({"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(TensorError, match="'z' has unsupported dtype complex128"):
        from_numpy({"z": np.zeros(2, dtype=complex)})


def test_metadata_of_body_is_read_back() -> None:
    data = b"".join(write(from_numpy({"x": np.arange(3)}), {"name": "digits"}))
    arrays, metadata = read(data)
    assert metadata == {"name": "digits"}
    assert to_numpy(arrays)["x"].tolist() == [0, 1, 2]


def test_tensor_with_reserved_name_is_refused() -> None:
    with pytest.raises(TensorError, match="__metadata__"):
        write_body({"__metadata__": torch.zeros(1)})


def test_header_above_limit_is_refused() -> None:
    with pytest.raises(TensorError, match="at most"):
        write(from_numpy({"x" * HEADER_LIMIT: np.zeros(1)}))


@given(st.binary(max_size=200))
def test_reading_random_bytes_raises_nothing_but_tensor_error(data: bytes) -> None:
    # Some random bytes are a valid body.
    with contextlib.suppress(TensorError):
        read_tensors(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "I64", "F31", None]),
        "shape": st.lists(
            st.integers(-1, 3) | st.just(2**70) | st.floats(), max_size=3
        ),
        "data_offsets": st.lists(st.integers(-1, 20), min_size=2, max_size=2)
        | json_values,
    }
)


@given(
    st.dictionaries(st.text(max_size=5), entries | json_values, max_size=3)
    | json_values,
    st.binary(max_size=24),
)
def test_reading_random_header_raises_nothing_but_tensor_error(
    header: Any, values: bytes
) -> None:
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + values
    # Some of these headers are valid.
    with contextlib.suppress(TensorError):
        read_tensors(data)


@given(tensors(), st.data())
def test_truncated_body_is_refused(
    values: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    body = write_body(values)
    length = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(TensorError):
        read(body[:length])


def make_dataset() -> Dataset:
    images = np.random.default_rng(1).random((5, 1, 2, 3), dtype=np.float32)
    return Dataset("tiny", 3, images, np.arange(5) % 3, images[:2], np.arange(2))


def test_packed_dataset_is_unpacked() -> None:
    original = make_dataset()
    unpacked = unpack(pack(original))
    assert (unpacked.name, unpacked.classes) == ("tiny", 3)
    np.testing.assert_array_equal(unpacked.train_images, original.train_images)
    np.testing.assert_array_equal(unpacked.test_labels, original.test_labels)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_samples_keep_shape_and_type(shape: tuple[int, ...], dtype: type) -> None:
    samples = np.arange(5 * math.prod(shape)).reshape(5, *shape).astype(dtype)
    labels = np.arange(5)
    original = Dataset("tokens", 5, samples, labels, samples[:2], labels[:2])
    unpacked = unpack(pack(original))
    assert unpacked.train_images.dtype == dtype
    np.testing.assert_array_equal(unpacked.train_images, samples)
    np.testing.assert_array_equal(unpacked.test_images, samples[:2])


@pytest.mark.parametrize(
    ("changed_arrays", "metadata", "message"),
    [
        (None, {"name": "x"}, "a name and a number"),
        (None, {"name": "x", "classes": "many"}, "a name and a number"),
        ({"train_labels": np.arange(4)}, None, "equal numbers of samples"),
        ({"train_images": np.zeros(5, np.float32)}, None, r"\(samples, ...\)"),
        (
            {"train_images": np.zeros((5, 6), np.float32)},
            None,
            "one shape and one type",
        ),
        (
            {"train_images": np.zeros((5, 1, 2, 2), np.int64)},
            None,
            "one shape and one type",
        ),
        (
            {"test_images": np.zeros((2, 1, 2, 2), np.float32)},
            None,
            "one shape and one type",
        ),
        ({"train_labels": np.arange(5).astype(np.int32)}, None, "needs the arrays"),
    ],
)
def test_invalid_dataset_is_refused(
    changed_arrays: Any, metadata: Any, message: str
) -> None:
    raw_arrays, original_metadata = read(pack(make_dataset()))
    arrays = {**to_numpy(raw_arrays), **(changed_arrays or {})}
    data = b"".join(write(from_numpy(arrays), metadata or original_metadata))
    with pytest.raises(TensorError, match=message):
        unpack(data)


def test_dataset_without_arrays_is_refused() -> None:
    data = b"".join(write(from_numpy({}), {"name": "x", "classes": "3"}))
    with pytest.raises(TensorError, match="needs the arrays"):
        unpack(data)
