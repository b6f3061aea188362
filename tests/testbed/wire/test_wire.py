"""Messages on the wire: what goes in comes out, and nothing else ever does anything but raise `WireError`."""

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
NUMBERS = st.integers(0, 2**63 - 1)


@given(messages, st.text(max_size=10), NUMBERS, NUMBERS)
def test_round_trip(
    message: Message, sender: str, incarnation: int, sequence: int
) -> None:
    data = encode(message, sender, incarnation, sequence)
    arrived = decode(bytearray(data))
    found = arrived.message
    assert (arrived.incarnation, arrived.sequence) == (incarnation, sequence)
    assert (found.kind, found.fields, found.sender, found.padding) == (
        message.kind, message.fields, sender, message.padding,
    )  # fmt: skip
    assert list(found.tensors) == list(message.tensors)
    assert all(
        torch.equal(found.tensors[name], tensor)
        for name, tensor in message.tensors.items()
    )


@given(messages, st.text(max_size=10))
def test_the_size_is_known_without_encoding(message: Message, sender: str) -> None:
    really = len(encode(message, sender, incarnation=87_000_000_000_000, sequence=12))
    assert content_size(message, sender) == really
    assert size(message, sender) == wire_bytes(really)


@pytest.mark.parametrize("name", ["bool", "uint8", "bfloat16", "int64"])
def test_the_size_of_each_type_of_tensor(name: str) -> None:
    message = Message(
        "m",
        tensors={
            "t": torch.zeros(7, 3, dtype=getattr(torch, name)),
            "u": torch.zeros(()),
        },
    )
    assert content_size(message, "a") == len(
        encode(message, "a", incarnation=10**13, sequence=10)
    )


@given(messages, st.text(max_size=10))
def test_delivered_is_what_comes_out_of_the_wire(message: Message, sender: str) -> None:
    found, bytes_ = delivered(message, sender)
    really = decode(bytearray(encode(message, sender, incarnation=10**13, sequence=10)))
    assert (found.kind, found.fields, found.sender, found.padding) == (
        really.message.kind, really.message.fields, sender, message.padding,
    )  # fmt: skip
    assert all(
        torch.equal(found.tensors[name], tensor)
        for name, tensor in really.message.tensors.items()
    )
    assert bytes_ == content_size(message, sender)


@pytest.mark.parametrize("message", [
    Message("m", {"a": object()}),
    Message("m", {"a": "x" * HEADER_LIMIT}),
    Message("m", tensors={"t": torch.zeros(2, dtype=torch.complex64)}),
])  # fmt: skip
def test_what_cannot_travel_has_no_size(message: Message) -> None:
    with pytest.raises(WireError) as sent:
        encode(message, "a")
    with pytest.raises(WireError) as sized:
        delivered(message, "a")
    assert str(sized.value).split()[:4] == str(sent.value).split()[:4]


@given(messages)
def test_the_sender_is_whoever_encodes(message: Message) -> None:
    forged = Message(message.kind, message.fields, sender="somebody else")
    assert decode(encode(forged, "a")).message.sender == "a"


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@given(messages, st.data())
def test_truncations_and_additions(message: Message, data: st.DataObject) -> None:
    whole = encode(message, "a")
    with pytest.raises(WireError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(WireError):
        decode(whole + data.draw(st.binary(min_size=1, max_size=20)))


@given(messages, st.data())
def test_flipped_bytes_are_refused_or_make_another_message(
    message: Message, data: st.DataObject
) -> None:
    whole = bytearray(encode(message, "a"))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(
            st.integers(0, 255)
        )
    with contextlib.suppress(WireError):  # the one error there may be
        decode(whole)


@given(values)
def test_headers_of_any_json(header: Any) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(WireError):
        decode(_PREFIX.pack(MAGIC, VERSION, len(text), 0) + text)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": -1}, {"sequence": True}, {"sequence": 2**63}, {"incarnation": -1},
        {"padding": 1}, {"padding": 2.0}, {"fields": []}, {"kind": None}, {"sender": 3}, {"more": 1},
    ],
)  # fmt: skip
def test_headers_that_are_not_quite_right(change: dict[str, Any]) -> None:
    header = {
        "kind": "k",
        "fields": {},
        "sender": "a",
        "incarnation": 0,
        "sequence": 0,
        "padding": 0,
    } | change
    text = json.dumps(header).encode()
    with pytest.raises(WireError):
        decode(_PREFIX.pack(MAGIC, VERSION, len(text), 0) + text)


def test_deep_nesting_is_refused_both_ways() -> None:
    text = b"[" * 100_000
    with pytest.raises(WireError):
        decode(_PREFIX.pack(MAGIC, VERSION, len(text), 0) + text)
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(WireError):
        encode(Message("deep", {"x": nested}), "a")


def test_announced_sizes_allocate_nothing() -> None:
    for header, body in ((2**32 - 1, 0), (0, 2**64 - 1), (HEADER_LIMIT, 2**63)):
        with pytest.raises(WireError, match="truncated"):
            decode(_PREFIX.pack(MAGIC, VERSION, header, body))


def test_other_versions_are_refused() -> None:
    data = bytearray(encode(Message("k"), "a"))
    data[4] += 1
    with pytest.raises(WireError, match="version"):
        decode(data)


def test_fields_that_are_not_json_or_too_many() -> None:
    with pytest.raises(WireError, match="'tensor' must be"):
        encode(Message("tensor", {"x": torch.zeros(1)}), "a")
    with pytest.raises(WireError, match="send large values as tensors"):
        encode(Message("long", {"x": "y" * HEADER_LIMIT}), "a")
    with pytest.raises(WireError, match="complex64"):
        encode(
            Message("complex", tensors={"x": torch.zeros(1, dtype=torch.complex64)}),
            "a",
        )


def test_special_numbers_travel() -> None:
    fields = decode(
        encode(Message("loss", {"nan": math.nan, "inf": math.inf}), "a")
    ).message.fields
    assert math.isnan(fields["nan"])
    assert fields["inf"] == math.inf


def test_what_is_changed_after_encoding_does_not_travel() -> None:
    tensor = torch.zeros(3)
    data = encode(Message("weights", tensors={"w": tensor}), "a")
    tensor.fill_(9)
    assert decode(data).message.tensors["w"].tolist() == [0, 0, 0]


def test_padding_is_charged() -> None:
    assert (
        len(encode(Message("k", padding=1000), "a"))
        == len(encode(Message("k", padding=1001), "a")) - 1
    )


def test_messages_without_tensors_need_no_torch() -> None:
    program = (
        "import sys; from testbed.wire.message import *; "
        "decode(encode(Message('k'), 'a')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
