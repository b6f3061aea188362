"""Encoding and decoding of messages that are dataclasses."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

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
class Activation(TypedMessage, kind="activation", key=("step", "part")):
    step: int
    part: int
    tensor: torch.Tensor
    note: str | None = None


@dataclass(frozen=True)
class Weights(TypedMessage, kind="weights", key=("step",)):
    step: int
    rate: float | None
    labels: torch.Tensor
    state: State


@dataclass(frozen=True)
class LossReport(TypedMessage, kind="loss"):
    loss: Fixed | None


@dataclass(frozen=True)
class ExtendedActivation(Activation, kind="activation"):
    first: bool | None = None


def test_tensors_are_encoded_separately_from_fields():
    tensor = torch.arange(3)
    message = encode(Activation(4, 2, tensor))
    assert message == Message("activation", {"step": 4, "part": 2}, {"tensor": tensor})


def test_decoded_message_has_sender():
    tensors = {"tensor": torch.arange(3)}
    message = Message("activation", {"step": 4, "part": 2}, tensors, sender="worker1")
    assert decode(Activation, message).sender == "worker1"


def test_state_contains_all_other_tensors_by_name():
    state = {"0.weight": torch.ones(2), "momentum:0.weight": torch.zeros(2)}
    message = encode(Weights(1, None, torch.arange(2), state))
    # The rate has no default, so that its None is sent.
    assert message.fields == {"step": 1, "rate": None}
    assert message.tensors.keys() == {"labels", *state}
    assert decode(Weights, message).state.keys() == state.keys()


def test_none_is_omitted_for_field_with_default_none():
    assert "note" not in encode(Activation(0, 0, torch.ones(1))).fields
    message = encode(Activation(0, 0, torch.ones(1), note="late"))
    assert message.fields["note"] == "late"


def test_identity_is_value_of_key():
    tensor = torch.ones(1)
    assert Activation(4, 2, tensor).identity == (4, 2)
    assert Weights(4, None, tensor, {}).identity == 4
    # A subclass inherits the key.
    assert ExtendedActivation(4, 2, tensor, first=True).identity == (4, 2)


def test_message_with_unknown_field_is_refused():
    message = Message("activation", {"step": 1, "speed": 3}, {}, sender="worker1")
    with pytest.raises(WireError, match=r"'activation' of worker1"):
        decode(Activation, message)


@pytest.mark.parametrize("loss", [0.1, -2.3025850929940455, 1e-300, math.nan, 0.0])
def test_fixed_number_has_constant_size(loss: float) -> None:
    message = encode(LossReport(loss=loss))
    size_of_one = content_size(encode(LossReport(loss=1.0)), "one")
    assert content_size(message, "one") == size_of_one
    decoded = decode(LossReport, message)
    assert decoded.loss == pytest.approx(loss, rel=0, nan_ok=True)


def test_fixed_number_may_be_none() -> None:
    assert decode(LossReport, encode(LossReport(loss=None))).loss is None


def test_invalid_fixed_number_is_refused() -> None:
    with pytest.raises(WireError):
        decode(LossReport, Message("loss", {"loss": "much"}))


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


# Postponed annotations are texts, in which torch may be named without being imported yet.
@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
@pytest.mark.parametrize(
    ("torch_import", "tensor"),
    [
        ("import torch", "torch.Tensor"),
        ("from testbed.ml.lazy import torch", "torch.Tensor"),
        ("from torch import Tensor", "Tensor"),
    ],
)
def test_tensor_fields_are_recognised_in_any_annotation(
    future: str,
    torch_import: str,
    tensor: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each module has a name of its own, since Python caches imported modules.
    name = f"annotations_{abs(hash((future, torch_import)))}"
    source = MODULE.format(future=future, torch=torch_import, tensor=tensor)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    weights = {"0.weight": torch.ones(2)}
    message = encode(module.Update(torch.zeros(1), weights))
    assert message.tensors.keys() == {"first", "0.weight"}
    assert message.fields == {"loss": f"{0.0:+24.16e}"}
    assert decode(module.Update, message).state.keys() == weights.keys()
    assert encode(module.Gradients(weights)).tensors.keys() == weights.keys()


def example_methods() -> list[Path]:
    files = []
    for file in sorted(Path("scenarios/examples").glob("*.py")):
        if "TypedMessage" in file.read_text():
            files.append(file)
    return files


def import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"imported_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def message_classes(module: ModuleType) -> dict[str, type[TypedMessage]]:
    """Return the message classes defined in a module, without imported ones."""
    classes = {}
    for name, value in vars(module).items():
        is_message = isinstance(value, type) and issubclass(value, TypedMessage)
        if is_message and value.__module__ == module.__name__:
            classes[name] = value
    return classes


@pytest.mark.parametrize("file", example_methods(), ids=lambda file: file.stem)
def test_imported_and_compiled_example_encode_messages_equally(file: Path) -> None:
    # A method of a package is imported from its file; a method that a scenario names is compiled from its text.
    imported = import_file(file)
    code = usercode.read(file, "", ("method", "file"))
    compiled = usercode.load(code, ("method", "file"))
    for name, kind in message_classes(imported).items():
        assert _classify_fields(kind) == _classify_fields(getattr(compiled, name))


def test_unresolvable_annotation_is_reported() -> None:
    @dataclass(frozen=True)
    class Wrong(TypedMessage, kind="wrong"):
        value: Nothing  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(TypeError, match=r"Wrong.*cannot resolve.*Nothing"):
        encode(Wrong(1))
