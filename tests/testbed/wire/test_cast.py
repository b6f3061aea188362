"""Casts in bytes: what comes back, and how little stands around the values."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.arrays import from_raw
from testbed.wire.cast import HEADER, CastForm, with_gaps
from testbed.wire.message import Message, WireError, as_cast
from testbed.wire.tensors import Raw, TensorError

NAMES = [f"pi{number}" for number in range(1, 11)]
FORMS = {name: CastForm(name, reversed(NAMES)) for name in NAMES}


def outputs(**fields):
    return Message(
        "outputs",
        {"batch": 1234, "layer": 3, **fields},
        {"tensor": torch.rand(100, 64)},
    )


def test_a_header_byte_by_byte():
    message = Message("m", {"a": 1}, {"x": torch.zeros(2, 200)}, padding=300)
    header = FORMS["pi2"].header(message, ["pi1", "pi9", "pi10"])
    # In the order of names, pi10 stands behind pi1.
    sender, audience = b"\2\0", bytes([0b11, 0b10])
    assert (
        header
        == sender
        + audience
        + b'\1m\x07{"a":1}'
        + b"\1"
        + b"\1x\x07\2"
        + b"\2\xc8\1"
        + b"\xac\2"
    )
    whole = FORMS["pi2"].encode(message, ["pi1", "pi9", "pi10"])
    assert len(whole) == len(header) + 1600 + 300


def test_the_size_of_a_header_is_known_without_making_it():
    form = CastForm("pi1", NAMES)
    for batch in (7, 8, 1234, 5678):
        message = Message(
            "outputs",
            {"batch": batch, "text": "é"},
            {"x": torch.zeros(2, 200)},
            padding=300,
        )
        _, fields = as_cast(message, "pi1")
        assert form.header_size(message, ["pi2"], fields) == len(
            form.header(message, ["pi3"])
        )
    with pytest.raises(WireError, match="cannot be broadcast"):
        form.header_size(
            Message("outputs", {}, {"x": torch.zeros(2, dtype=torch.complex64)}),
            ["pi2"],
            2,
        )


def test_around_the_values_of_a_layer_are_less_bytes_than_planned():
    message = outputs()
    whole = FORMS["pi1"].encode(message, NAMES[1:])
    assert len(whole) - message.tensors["tensor"].nbytes == 50 <= HEADER


def test_a_note_travels_in_it():
    note = {"stage": 2, "records": {"pi3": [4, {"pi1": [0.8123, 0.5]}]}}
    read = FORMS["pi3"].decode(FORMS["pi1"].encode(outputs(note=note), ["pi3"]))
    assert read is not None
    assert read[0]["note"] == note


types = st.sampled_from(
    [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
)
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, types)
fields = st.dictionaries(
    st.text(max_size=9),
    st.integers() | st.text() | st.lists(st.floats(0, 1)),
    max_size=4,
)


@given(
    st.text(max_size=20),
    fields,
    st.dictionaries(st.text(max_size=9), tensors, max_size=3),
    st.integers(0, 300),
)
def test_what_is_cast_comes_back(kind, said, carried, padding):
    whole = FORMS["pi1"].encode(Message(kind, said, carried, padding=padding), ["pi3"])
    read = FORMS["pi3"].decode(whole)
    assert read is not None
    message, header = read
    assert (message.kind, message.fields, message.sender, message.padding) == (
        kind,
        said,
        "pi1",
        padding,
    )
    assert message.tensors.keys() == carried.keys()
    assert all(
        torch.equal(message.tensors[name], tensor) for name, tensor in carried.items()
    )
    assert header == len(whole) - padding - sum(
        tensor.nbytes for tensor in carried.values()
    )
    assert FORMS["pi2"].decode(whole) is None


@given(st.binary(max_size=200))
def test_anything_else_is_refused_or_for_others(data):
    with contextlib.suppress(WireError):
        FORMS["pi3"].decode(data)


def test_what_is_cut_off_is_refused():
    whole = FORMS["pi1"].encode(outputs(), ["pi3"])
    for length in (1, 3, 20, 40, 50, len(whole) - 1):
        with pytest.raises(WireError):
            FORMS["pi3"].decode(whole[:length])
    with pytest.raises(WireError):
        FORMS["pi3"].decode(whole + b"\0")


def test_what_cannot_be_cast_is_said():
    for message in (
        Message("m", {"a": object()}),
        Message("m", {}, {"x": torch.zeros(1, dtype=torch.complex64)}),
    ):
        with pytest.raises(WireError, match="message 'm' cannot be broadcast"):
            FORMS["pi1"].header(message, ["pi2"])


def test_frames_that_are_lost_are_zeros_and_marked():
    # A header of 20 bytes, then 6 values of 4 bytes and 3 of 8: frames of 10 bytes.
    message = Message(
        "m",
        {},
        {"x": torch.ones(2, 3), "y": torch.ones(3, dtype=torch.float64)},
        padding=7,
    )
    assert with_gaps(message, 20, 10, []) is message
    assert with_gaps(message, 20, 10, [7]) is message
    assert with_gaps(message, 20, 10, [1, 4]) is None
    left = with_gaps(message, 20, 10, [2, 5])
    assert left is not None
    # Bytes 20 to 29 are the first values; bytes 50 to 59 the first and second of what begins at 44.
    assert left.missing["x"].tolist() == [[True, True, True], [False, False, False]]
    assert left.missing["y"].tolist() == [True, True, False]
    assert left.tensors["x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert left.tensors["y"].tolist() == [0, 0, 1]
    assert message.tensors["x"].all()


def test_a_shape_without_values_that_no_tensor_can_have_is_refused():
    with pytest.raises(TensorError, match="its shape is too large"):
        from_raw([Raw("x", "F32", (0, 1 << 62, 1 << 62), memoryview(b""))])
