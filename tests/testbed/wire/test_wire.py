"""The encoding of messages as bytes, and the refusal of malformed bytes with `WireError`."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from testbed.wire.framing import wire_bytes
from testbed.wire.message import (
    _PREFIX,
    HEADER_LIMIT,
    MAGIC,
    VERSION,
    Message,
    WireError,
    content_size,
    decode,
    delivered,
    encode,
    size,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
messages = st.builds(
    Message,
    kind=st.text(max_size=10),
    fields=st.dictionaries(st.text(max_size=8), values, max_size=4),
    tensors=st.dictionaries(
        st.text(max_size=8),
        st.builds(
            torch.full,
            st.tuples(st.integers(0, 4), st.integers(1, 3)),
            st.floats(-9, 9),
        ),
        max_size=3,
    ),
    padding=st.integers(0, 100),
)
counters = st.integers(0, 2**63 - 1)
senders = st.text(max_size=10)

TYPICAL_COUNTERS = {"incarnation": 10**13, "sequence": 10}
"""Counters with the number of digits that `content_size` assumes: 14 and 2."""
UNSUPPORTED_TENSOR = torch.zeros(2, dtype=torch.complex64)
VALID_HEADER = {
    "kind": "k",
    "fields": {},
    "sender": "a",
    "incarnation": 0,
    "sequence": 0,
    "padding": 0,
}


def with_prefix(header: bytes) -> bytes:
    """Return a message with the given header and without tensors."""
    return _PREFIX.pack(MAGIC, VERSION, len(header), 0) + header


def assert_same_contents(actual: Message, expected: Message) -> None:
    """Compare two messages except for their senders."""
    assert actual.kind == expected.kind
    assert actual.fields == expected.fields
    assert actual.padding == expected.padding
    assert list(actual.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[name], tensor)


@given(messages, senders, counters, counters)
def test_decoded_message_equals_encoded_message(
    message: Message, sender: str, incarnation: int, sequence: int
) -> None:
    data = encode(message, sender, incarnation, sequence)
    envelope = decode(bytearray(data))
    assert (envelope.incarnation, envelope.sequence) == (incarnation, sequence)
    assert envelope.message.sender == sender
    assert_same_contents(envelope.message, message)


@given(messages, senders)
def test_size_equals_length_of_encoded_message(message: Message, sender: str) -> None:
    encoded = encode(message, sender, incarnation=87_000_000_000_000, sequence=12)
    assert content_size(message, sender) == len(encoded)
    assert size(message, sender) == wire_bytes(len(encoded))


@pytest.mark.parametrize("name", ["bool", "uint8", "bfloat16", "int64"])
def test_size_is_exact_for_tensor_type(name: str) -> None:
    matrix = torch.zeros(7, 3, dtype=getattr(torch, name))
    message = Message("m", tensors={"t": matrix, "u": torch.zeros(())})
    encoded = encode(message, "a", **TYPICAL_COUNTERS)
    assert content_size(message, "a") == len(encoded)


@given(messages, senders)
def test_simulated_delivery_equals_decoded_message(
    message: Message, sender: str
) -> None:
    simulated, content_bytes = delivered(message, sender)
    encoded = encode(message, sender, **TYPICAL_COUNTERS)
    assert simulated.sender == sender
    assert_same_contents(simulated, decode(bytearray(encoded)).message)
    assert content_bytes == content_size(message, sender)


@pytest.mark.parametrize(
    "message",
    [
        Message("m", {"a": object()}),
        Message("m", {"a": "x" * HEADER_LIMIT}),
        Message("m", tensors={"t": UNSUPPORTED_TENSOR}),
    ],
    ids=["field that is not JSON", "long field", "unsupported dtype"],
)
def test_simulated_delivery_refuses_unencodable_message(message: Message) -> None:
    with pytest.raises(WireError) as encode_error:
        encode(message, "a")
    with pytest.raises(WireError) as delivery_error:
        delivered(message, "a")
    # Sizes later in the error messages may differ.
    assert str(delivery_error.value).split()[:4] == str(encode_error.value).split()[:4]


@given(messages)
def test_encoding_device_replaces_sender_of_message(message: Message) -> None:
    forged = Message(message.kind, message.fields, sender="somebody else")
    assert decode(encode(forged, "a")).message.sender == "a"


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(messages, st.data())
def test_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    encoded = encode(message, "a")
    length = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(WireError):
        decode(encoded[:length])


@given(messages, st.binary(min_size=1, max_size=20))
def test_message_with_trailing_bytes_is_refused(
    message: Message, trailing: bytes
) -> None:
    with pytest.raises(WireError):
        decode(encode(message, "a") + trailing)


@given(messages, st.data())
def test_decoding_corrupt_message_raises_nothing_but_wire_error(
    message: Message, data: st.DataObject
) -> None:
    corrupt = bytearray(encode(message, "a"))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(corrupt) - 1))
        corrupt[position] = data.draw(st.integers(0, 255))
    # A changed byte of a value yields another valid message.
    with contextlib.suppress(WireError):
        decode(corrupt)


@given(values)
def test_random_json_header_is_refused(header: Any) -> None:
    with pytest.raises(WireError):
        decode(with_prefix(json.dumps(header).encode()))


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": -1},
        {"sequence": True},
        {"sequence": 2**63},
        {"incarnation": -1},
        {"padding": 1},
        {"padding": 2.0},
        {"fields": []},
        {"kind": None},
        {"sender": 3},
        {"more": 1},
    ],
    ids=str,
)
def test_invalid_header_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode(with_prefix(json.dumps(VALID_HEADER | change).encode()))


def test_deeply_nested_header_is_refused() -> None:
    with pytest.raises(WireError):
        decode(with_prefix(b"[" * 100_000))


def test_deeply_nested_field_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(WireError):
        encode(Message("deep", {"x": nested}), "a")


@pytest.mark.parametrize(
    ("header_size", "body_size"),
    [(2**32 - 1, 0), (0, 2**64 - 1), (HEADER_LIMIT, 2**63)],
)
def test_sizes_beyond_received_bytes_are_refused_without_allocation(
    header_size: int, body_size: int
) -> None:
    with pytest.raises(WireError, match="truncated"):
        decode(_PREFIX.pack(MAGIC, VERSION, header_size, body_size))


def test_other_version_is_refused() -> None:
    data = bytearray(encode(Message("k"), "a"))
    # The version follows the four bytes of the magic number.
    data[len(MAGIC)] += 1
    with pytest.raises(WireError, match="version"):
        decode(data)


def test_tensor_among_fields_is_refused() -> None:
    with pytest.raises(WireError, match="'tensor' must be"):
        encode(Message("tensor", {"x": torch.zeros(1)}), "a")


def test_fields_above_limit_are_refused() -> None:
    with pytest.raises(WireError, match="send large values as tensors"):
        encode(Message("long", {"x": "y" * HEADER_LIMIT}), "a")


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(WireError, match="complex64"):
        encode(Message("complex", tensors={"x": UNSUPPORTED_TENSOR}), "a")


def test_nan_and_infinity_are_valid_fields() -> None:
    message = Message("loss", {"nan": math.nan, "inf": math.inf})
    fields = decode(encode(message, "a")).message.fields
    assert math.isnan(fields["nan"])
    assert fields["inf"] == math.inf


def test_encoded_values_are_copies_of_tensors() -> None:
    tensor = torch.zeros(3)
    data = encode(Message("weights", tensors={"w": tensor}), "a")
    tensor.fill_(9)
    assert decode(data).message.tensors["w"].tolist() == [0, 0, 0]


def test_each_byte_of_padding_is_sent() -> None:
    # Both numbers have four digits, so that the headers are equally long.
    shorter = encode(Message("k", padding=1000), "a")
    longer = encode(Message("k", padding=1001), "a")
    assert len(longer) - len(shorter) == 1


def test_message_without_tensors_is_encoded_without_torch() -> None:
    # This process has imported torch already.
    program = (
        "import sys; from testbed.wire.message import *; "
        "decode(encode(Message('k'), 'a')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
