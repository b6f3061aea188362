"""The encoding of casts as bytes."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.ml.arrays import from_raw
from testbed.wire.cast import HEADER, CastEncoding, with_gaps
from testbed.wire.message import Message, WireError, as_cast
from testbed.wire.tensors import Raw, TensorError

NAMES = [f"pi{number}" for number in range(1, 11)]
# The order of the names given to an encoding must not matter.
FORMS = {name: CastEncoding(name, reversed(NAMES)) for name in NAMES}


def outputs_message(**fields):
    return Message(
        "outputs",
        {"batch": 1234, "layer": 3, **fields},
        {"tensor": torch.rand(100, 64)},
    )


def test_header_has_documented_bytes():
    message = Message("m", {"a": 1}, {"x": torch.zeros(2, 200)}, padding=300)
    receivers = ["pi1", "pi9", "pi10"]
    # In the order of names, pi10 follows pi1, so that pi2 has index 2.
    sender, audience = b"\2\0", bytes([0b11, 0b10])
    kind, fields = b"\1m", b'\x07{"a":1}'
    tensor_count = b"\1"
    # Name, code of float32, two axes, and their sizes: 200 takes two bytes as LEB128.
    tensor = b"\1x" + b"\x07" + b"\2" + b"\2\xc8\1"
    padding = b"\xac\2"
    header = FORMS["pi2"].header(message, receivers)
    expected = sender + audience + kind + fields + tensor_count + tensor + padding
    assert header == expected
    # 2 * 200 values of four bytes and 300 bytes of padding follow.
    assert len(FORMS["pi2"].encode(message, receivers)) == len(header) + 1600 + 300


def test_header_size_equals_length_of_header():
    encoding = CastEncoding("pi1", NAMES)
    # Batches 8 and 5678 get the size from the cache, since they have as many digits as their predecessors.
    for batch in (7, 8, 1234, 5678):
        message = Message(
            "outputs",
            {"batch": batch, "text": "é"},
            {"x": torch.zeros(2, 200)},
            padding=300,
        )
        _, fields_size = as_cast(message, "pi1")
        header = encoding.header(message, ["pi3"])
        assert encoding.header_size(message, ["pi2"], fields_size) == len(header)


def test_header_size_of_unsupported_dtype_is_refused():
    message = Message("outputs", {}, {"x": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(WireError, match="cannot be broadcast"):
        CastEncoding("pi1", NAMES).header_size(message, ["pi2"], 2)


def test_overhead_of_layer_output_is_at_most_estimate():
    message = outputs_message()
    encoded = FORMS["pi1"].encode(message, NAMES[1:])
    # 4 for sender and audience, 8 for the kind, 1 + 24 for the JSON, 12 for the tensor with its name, 1 for padding.
    assert len(encoded) - message.tensors["tensor"].nbytes == 50
    assert HEADER >= 50


def test_nested_field_is_preserved():
    note = {"stage": 2, "records": {"pi3": [4, {"pi1": [0.8123, 0.5]}]}}
    data = FORMS["pi1"].encode(outputs_message(note=note), ["pi3"])
    decoded = FORMS["pi3"].decode(data)
    assert decoded is not None
    assert decoded[0]["note"] == note


dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16]
)
shapes = st.lists(st.integers(0, 5), max_size=4)
tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, dtypes)
fields = st.dictionaries(
    st.text(max_size=9),
    st.integers() | st.text() | st.lists(st.floats(0, 1)),
    max_size=4,
)
messages = st.builds(
    Message,
    st.text(max_size=20),
    fields,
    st.dictionaries(st.text(max_size=9), tensors, max_size=3),
    padding=st.integers(0, 300),
)


@given(messages)
def test_decoded_cast_equals_encoded_message(message):
    data = FORMS["pi1"].encode(message, ["pi3"])
    decoded = FORMS["pi3"].decode(data)
    assert decoded is not None
    received, header_size = decoded
    assert received.kind == message.kind
    assert received.fields == message.fields
    assert received.sender == "pi1"
    assert received.padding == message.padding
    assert received.tensors.keys() == message.tensors.keys()
    tensor_bytes = 0
    for name, tensor in message.tensors.items():
        assert torch.equal(received.tensors[name], tensor)
        tensor_bytes += tensor.nbytes
    assert header_size == len(data) - message.padding - tensor_bytes
    # pi2 is not a receiver.
    assert FORMS["pi2"].decode(data) is None


@given(st.binary(max_size=200))
def test_decoding_random_bytes_raises_nothing_but_wire_error(data):
    # Random bytes may be addressed to other devices, and are ignored then.
    with contextlib.suppress(WireError):
        FORMS["pi3"].decode(data)


def test_truncated_or_extended_cast_is_refused():
    data = FORMS["pi1"].encode(outputs_message(), ["pi3"])
    # The header has 50 bytes, and the batch is the largest of its fields.
    for length in (1, 3, 20, 40, 50, len(data) - 1):
        with pytest.raises(WireError):
            FORMS["pi3"].decode(data[:length])
    with pytest.raises(WireError):
        FORMS["pi3"].decode(data + b"\0")


@pytest.mark.parametrize(
    "message",
    [
        Message("m", {"a": object()}),
        Message("m", {}, {"x": torch.zeros(1, dtype=torch.complex64)}),
    ],
    ids=["field that is not JSON", "unsupported dtype"],
)
def test_header_of_unencodable_message_is_refused(message):
    with pytest.raises(WireError, match="message 'm' cannot be broadcast"):
        FORMS["pi1"].header(message, ["pi2"])


def test_values_in_lost_frames_are_zeroed_and_marked():
    # A header of 20 bytes, then 6 values of 4 bytes and 3 of 8: frames of 10 bytes.
    message = Message(
        "m",
        {},
        {"x": torch.ones(2, 3), "y": torch.ones(3, dtype=torch.float64)},
        padding=7,
    )
    assert with_gaps(message, 20, 10, []) is message
    # Frame 7 has padding only, and frame 1 the end of the header.
    assert with_gaps(message, 20, 10, [7]) is message
    assert with_gaps(message, 20, 10, [1, 4]) is None
    incomplete = with_gaps(message, 20, 10, [2, 5])
    assert incomplete is not None
    # Bytes 20 to 29 touch the first three values of x; bytes 50 to 59 the first two of y, which begins at 44.
    assert incomplete.missing["x"].tolist() == [
        [True, True, True],
        [False, False, False],
    ]
    assert incomplete.missing["y"].tolist() == [True, True, False]
    assert incomplete.tensors["x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert incomplete.tensors["y"].tolist() == [0, 0, 1]
    # The sender's own tensor is unchanged.
    assert message.tensors["x"].all()


def test_empty_tensor_with_too_large_shape_is_refused():
    with pytest.raises(TensorError, match="its shape is too large"):
        from_raw([Raw("x", "F32", (0, 1 << 62, 1 << 62), memoryview(b""))])
