"""Messages as dataclasses, there and back."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from testbed.common import usercode
from testbed.messaging.typed_messages import (
    Fixed,
    TypedMessage,
    _classify_fields,
    decode,
    encode,
)
from testbed.ml.layers.shard import State
from testbed.wire.message import Message, WireError, content_size


@dataclass(frozen=True)
class Piece(TypedMessage, kind="piece", key=("step", "part")):
    step: int
    part: int
    tensor: torch.Tensor
    note: str | None = None


@dataclass(frozen=True)
class Whole(TypedMessage, kind="whole", key=("step",)):
    step: int
    rate: float | None
    labels: torch.Tensor
    state: State


@dataclass(frozen=True)
class Lost(TypedMessage, kind="lost"):
    loss: Fixed | None


@dataclass(frozen=True)
class Noted(Piece, kind="piece"):
    first: bool | None = None


def test_tensors_travel_beside_the_fields():
    tensor = torch.arange(3)
    message = encode(Piece(4, 2, tensor))
    assert message == Message("piece", {"step": 4, "part": 2}, {"tensor": tensor})
    assert (
        decode(
            Piece, Message("piece", message.fields, message.tensors, "worker1")
        ).sender
        == "worker1"
    )


def test_a_state_is_all_other_tensors_under_their_own_names():
    state = {"0.weight": torch.ones(2), "momentum:0.weight": torch.zeros(2)}
    message = encode(Whole(1, None, torch.arange(2), state))
    assert message.fields == {"step": 1, "rate": None}
    assert message.tensors.keys() == {"labels", *state}
    assert decode(Whole, message).state.keys() == state.keys()


def test_only_fields_with_default_none_are_omitted():
    assert "note" not in encode(Piece(0, 0, torch.ones(1))).fields
    assert encode(Piece(0, 0, torch.ones(1), "late")).fields["note"] == "late"


def test_key_distinguishes_messages():
    assert Piece(4, 2, torch.ones(1)).identity == (4, 2)
    assert Whole(4, None, torch.ones(1), {}).identity == 4
    assert Noted(4, 2, torch.ones(1), first=True).identity == (4, 2)


def test_message_with_other_fields_is_refused():
    with pytest.raises(WireError, match=r"'piece' of worker1"):
        decode(Piece, Message("piece", {"step": 1, "speed": 3}, {}, "worker1"))


@pytest.mark.parametrize("loss", [0.1, -2.3025850929940455, 1e-300, math.nan, 0.0])
def test_fixed_number_has_constant_size(loss: float) -> None:
    sent = encode(Lost(loss=loss))
    assert content_size(sent, "one") == content_size(encode(Lost(loss=1.0)), "one")
    assert decode(Lost, sent).loss == pytest.approx(loss, rel=0, nan_ok=True)
    assert decode(Lost, encode(Lost(loss=None))).loss is None
    with pytest.raises(WireError):
        decode(Lost, Message("lost", {"loss": "much"}))


MODULE = """
{future}
from collections.abc import Mapping
from dataclasses import dataclass
{torch}
from testbed.ml.layers.shard import State
from testbed.messaging.typed_messages import Fixed, TypedMessage

@dataclass(frozen=True)
class Update(TypedMessage, kind="update"):
    first: {tensor} | None
    state: State
    loss: Fixed = 0.0

@dataclass(frozen=True)
class Gradients(TypedMessage, kind="gradients"):
    gradients: Mapping[str, {tensor}]
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
@pytest.mark.parametrize(
    ("imported", "tensor"),
    [
        ("import torch", "torch.Tensor"),
        ("from testbed.ml.lazy import torch", "torch.Tensor"),
        ("from torch import Tensor", "Tensor"),
    ],
)
def test_the_spelling_of_annotations_does_not_matter(
    future: str,
    imported: str,
    tensor: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"spelled_{abs(hash((future, imported)))}"
    (tmp_path / f"{name}.py").write_text(
        MODULE.format(future=future, torch=imported, tensor=tensor)
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    weights = {"0.weight": torch.ones(2)}
    message = encode(module.Update(torch.zeros(1), weights))
    assert message.tensors.keys() == {"first", "0.weight"}
    assert message.fields == {"loss": f"{0.0:+24.16e}"}
    assert decode(module.Update, message).state.keys() == weights.keys()
    assert encode(module.Gradients(weights)).tensors.keys() == weights.keys()


METHODS = [
    file
    for file in sorted(Path("scenarios/examples").glob("*.py"))
    if "TypedMessage" in file.read_text()
]


@pytest.mark.parametrize("file", METHODS, ids=lambda file: file.stem)
def test_examples_send_the_same_messages_as_modules_and_as_scenario_code(
    file: Path,
) -> None:
    """A method of a package is imported from its file; one that a scenario names is compiled from its text."""
    code = usercode.read(file, "", ("method", "file"))
    spec = importlib.util.spec_from_file_location(f"imported_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    loaded = usercode.load(code, ("method", "file"))
    for name, kind in vars(module).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, TypedMessage)
            and kind.__module__ == module.__name__
        ):
            assert _classify_fields(kind) == _classify_fields(getattr(loaded, name))


def test_an_annotation_that_names_nothing_is_reported() -> None:
    @dataclass(frozen=True)
    class Wrong(TypedMessage, kind="wrong"):
        value: Nothing  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match=r"Wrong.*cannot resolve.*Nothing"):
        encode(Wrong(1))
