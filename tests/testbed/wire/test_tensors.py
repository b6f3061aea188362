"""The safetensors reader and writer against the library's, and against bytes that are not tensors."""

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
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    result = {}
    for name in draw(st.lists(st.text(max_size=8), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        values = torch.randint(
            0,
            2,
            shape,
            generator=torch.Generator().manual_seed(draw(st.integers(0, 99))),
        )
        result[name] = values.to(draw(st.sampled_from(DTYPES)))
    return result


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(left[name], right[name])
        for name in left
    )


def body(values: dict[str, torch.Tensor]) -> bytes:
    return b"".join(write(to_raw(values)))


@given(tensors())
def test_what_is_written_is_read(values: dict[str, torch.Tensor]) -> None:
    assert same(from_raw(read(bytearray(body(values)))[0]), values)


@given(tensors())
def test_the_library_reads_what_we_write_and_the_other_way_round(
    values: dict[str, torch.Tensor],
) -> None:
    theirs = safetensors.torch.load(body(values))
    assert same({name: theirs[name] for name in values}, values)
    ours = from_raw(read(safetensors.torch.save(values))[0])
    assert same({name: ours[name] for name in values}, values)


def test_strided_and_shared_tensors_travel() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    values = {
        "transposed": base.T,
        "row": base[1],
        "again": base,
        "expanded": torch.ones(1).expand(5),
    }
    assert same(from_raw(read(bytearray(body(values)))[0]), values)


def test_gradients_stay_behind() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert not from_raw(read(bytearray(body({"w": weight * 2})))[0])["w"].requires_grad


def test_tensors_are_views_of_a_writable_buffer_and_copies_of_another() -> None:
    data = bytearray(body({"x": torch.zeros(4)}))
    view = from_raw(read(data)[0])["x"]
    data[-4:] = np.float32(7).tobytes()
    assert view.tolist() == [0, 0, 0, 7]
    fixed = from_raw(read(bytes(data))[0])["x"]
    fixed[0] = 1
    assert np.frombuffer(bytes(data)[-16:], np.float32).tolist() == [0, 0, 0, 7]


def test_values_are_aligned_after_whatever_precedes_them() -> None:
    for offset in range(130):
        start, header, *_ = write(to_raw({"x": torch.zeros(4)}), offset=offset)
        assert (offset + len(start) + len(header)) % 64 == 0


def test_dtypes_that_do_not_travel_are_refused_by_name() -> None:
    with pytest.raises(
        TensorError, match=r"'z' has unsupported dtype torch\.complex64"
    ):
        to_raw({"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(TensorError, match="'z' has unsupported dtype complex128"):
        from_numpy({"z": np.zeros(2, dtype=complex)})


def test_metadata_travels_and_its_name_is_taken() -> None:
    data = b"".join(write(from_numpy({"x": np.arange(3)}), {"name": "digits"}))
    arrays, metadata = read(data)
    assert metadata == {"name": "digits"}
    assert to_numpy(arrays)["x"].tolist() == [0, 1, 2]
    with pytest.raises(TensorError, match="__metadata__"):
        body({"__metadata__": torch.zeros(1)})


def test_a_header_beyond_the_limit_is_not_written() -> None:
    with pytest.raises(TensorError, match="at most"):
        write(from_numpy({"x" * HEADER_LIMIT: np.zeros(1)}))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(TensorError):  # the one error there may be
        from_raw(read(data)[0])


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
def test_plausible_headers_are_refused_or_read(header: Any, values: bytes) -> None:
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + values
    with contextlib.suppress(TensorError):  # the one error there may be
        from_raw(read(data)[0])


@given(tensors(), st.data())
def test_no_part_of_tensors_is_taken_for_the_whole(
    values: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    whole = body(values)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with pytest.raises(TensorError):
        read(part)


def dataset() -> Dataset:
    images = np.random.default_rng(1).random((5, 1, 2, 3), dtype=np.float32)
    return Dataset("tiny", 3, images, np.arange(5) % 3, images[:2], np.arange(2))


def test_a_data_set_travels() -> None:
    found = unpack(pack(dataset()))
    assert (found.name, found.classes) == ("tiny", 3)
    np.testing.assert_array_equal(found.train_images, dataset().train_images)
    np.testing.assert_array_equal(found.test_labels, dataset().test_labels)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_samples_of_any_shape_travel_with_their_type(
    shape: tuple[int, ...], dtype: type
) -> None:
    samples, labels = (
        np.arange(5 * math.prod(shape)).reshape(5, *shape).astype(dtype),
        np.arange(5),
    )
    found = unpack(pack(Dataset("tokens", 5, samples, labels, samples[:2], labels[:2])))
    assert found.train_images.dtype == dtype
    np.testing.assert_array_equal(found.train_images, samples)
    np.testing.assert_array_equal(found.test_images, samples[:2])


@pytest.mark.parametrize(
    ("arrays", "metadata", "wrong"),
    [
        ({}, {"name": "x", "classes": "3"}, "has the arrays"),
        (None, {"name": "x"}, "a name and a number"),
        (None, {"name": "x", "classes": "many"}, "a name and a number"),
        ({"train_labels": np.arange(4)}, None, "with as many"),
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
        ({"test_images": np.zeros((2, 1, 2, 2), np.float32)}, None, "of one shape"),
        ({"train_labels": np.arange(5).astype(np.int32)}, None, "has the arrays"),
    ],
)
def test_other_tensors_are_no_data_set(arrays: Any, metadata: Any, wrong: str) -> None:
    found, named = read(pack(dataset()))
    changed = {} if arrays == {} else {**to_numpy(found), **(arrays or {})}
    with pytest.raises(TensorError, match=wrong):
        unpack(b"".join(write(from_numpy(changed), metadata or named)))
