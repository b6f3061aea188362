"""Lookup of torch's classes by the names in scenarios, and messages for unknown names and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.training.named import call_definition, find_definition
from testbed.ml.training.schema import NamedPart

KEY = ("training", "schedule")


def find_scheduler(name: str, **keys: Any) -> Callable[..., Any]:
    part = NamedPart(name=name)
    return find_definition(
        part, {}, KEY, lr_scheduler, lr_scheduler.LRScheduler, "LR", **keys
    )


@pytest.mark.parametrize(
    "name",
    ["CosineAnnealingLR", "cosineannealing", "cosine-annealing", "Cosine_Annealing LR"],
)
def test_case_dashes_and_common_suffix_are_optional(name: str) -> None:
    assert find_scheduler(name) is lr_scheduler.CosineAnnealingLR


def optimizer_classes() -> list[type[torch.optim.Optimizer]]:
    base = torch.optim.Optimizer
    classes = []
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, base) and value is not base:
            classes.append(value)
    return classes


def test_every_optimizer_of_torch_has_its_own_name() -> None:
    classes = optimizer_classes()
    # Without classes the loop below would prove nothing.
    assert len(classes) > 10
    key = ("training", "optimizer")
    for optimizer in classes:
        part = NamedPart(name=optimizer.__name__)
        definition = find_definition(part, {}, key, torch.optim, torch.optim.Optimizer)
        assert definition is optimizer


@pytest.mark.parametrize(
    "name", ["", "LR", "LRScheduler", "_LRScheduler", "Optimizer", "Any", "exponentiel"]
)
def test_unknown_name_is_rejected_with_available_names(name: str) -> None:
    with pytest.raises(InputError) as caught:
        find_scheduler(name)
    assert caught.value.key == ("training", "schedule", "name")
    assert "CosineAnnealingLR" in caught.value.text
    # Base classes and private names are not schedules.
    assert " _LRScheduler" not in caught.value.text


def test_excluded_name_is_rejected_and_not_listed() -> None:
    with pytest.raises(InputError) as caught:
        find_scheduler("step", unsupported=("StepLR",))
    assert "MultiStepLR" in caught.value.text
    assert " StepLR" not in caught.value.text


def test_user_file_precedes_torch() -> None:
    module = "named_of_a_test"
    source = "def StepLR():\n    return 7\n"
    code = Code(name="StepLR", module=module, sources={module: source})
    part = NamedPart(name="StepLR", file="own.py")
    definition = find_definition(
        part, {"own.py:StepLR": code}, KEY, lr_scheduler, lr_scheduler.LRScheduler
    )
    assert definition() == 7


def test_options_are_passed_to_class() -> None:
    part = NamedPart(name="dropout")
    assert call_definition(torch.nn.Dropout, part, KEY, p=0.25).p == 0.25


def test_errors_of_class_are_reported_with_name_in_scenario() -> None:
    part = NamedPart(name="dropout")
    message = r"training\.schedule: dropout: got an unexpected keyword argument 'share'"
    with pytest.raises(InputError, match=message):
        call_definition(torch.nn.Dropout, part, KEY, share=0.5)
    message = "dropout: dropout probability has to be between 0 and 1, but got 2"
    with pytest.raises(InputError, match=message):
        call_definition(torch.nn.Dropout, part, KEY, 2)


def test_error_without_message_is_reported_by_its_type() -> None:
    def fail() -> None:
        raise AssertionError

    with pytest.raises(InputError, match="dropout: AssertionError"):
        call_definition(fail, NamedPart(name="dropout"), KEY)
