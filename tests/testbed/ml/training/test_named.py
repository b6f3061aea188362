"""Names of torch as scenarios write them, and what is said of those that there are not."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.ml.training.named import call_definition, find_definition
from testbed.ml.training.schema import NamedPart

KEY = ("training", "schedule")


def found(name: str, **keys):
    part = NamedPart(name=name)
    return find_definition(
        part, {}, KEY, lr_scheduler, lr_scheduler.LRScheduler, "LR", **keys
    )


@pytest.mark.parametrize(
    "name",
    ["CosineAnnealingLR", "cosineannealing", "cosine-annealing", "Cosine_Annealing LR"],
)
def test_case_dashes_and_what_all_names_end_in_may_be_left_out(name: str) -> None:
    assert found(name) is lr_scheduler.CosineAnnealingLR


def test_every_class_of_torch_is_found_by_its_own_name() -> None:
    classes = [
        each
        for each in vars(torch.optim).values()
        if isinstance(each, type)
        and issubclass(each, torch.optim.Optimizer)
        and each is not torch.optim.Optimizer
    ]
    assert len(classes) > 10
    for each in classes:
        part = NamedPart(name=each.__name__)
        assert (
            find_definition(
                part, {}, ("training", "optimizer"), torch.optim, torch.optim.Optimizer
            )
            is each
        )


@pytest.mark.parametrize(
    "name", ["", "LR", "LRScheduler", "_LRScheduler", "Optimizer", "Any", "exponentiel"]
)
def test_unknown_names_are_rejected_with_the_valid_ones(name: str) -> None:
    with pytest.raises(InputError) as refused:
        found(name)
    assert refused.value.key == ("training", "schedule", "name")
    assert "CosineAnnealingLR" in refused.value.text
    assert " _LRScheduler" not in refused.value.text


def test_names_that_do_not_work_are_not_offered() -> None:
    with pytest.raises(InputError) as refused:
        found("step", without=("StepLR",))
    assert "MultiStepLR" in refused.value.text
    assert " StepLR" not in refused.value.text


def test_a_file_of_ones_own_goes_before_torch() -> None:
    code = Code(
        name="StepLR",
        module="named_of_a_test",
        sources={"named_of_a_test": "def StepLR():\n    return 7\n"},
    )
    part = NamedPart(name="StepLR", file="own.py")
    assert (
        find_definition(
            part, {"own.py:StepLR": code}, KEY, lr_scheduler, lr_scheduler.LRScheduler
        )()
        == 7
    )


def test_what_a_class_says_of_its_options_is_said_with_the_name_that_the_scenario_has() -> (
    None
):
    part = NamedPart(name="dropout")
    assert call_definition(torch.nn.Dropout, part, KEY, p=0.25).p == 0.25
    with pytest.raises(
        InputError,
        match=r"training\.schedule: dropout: got an unexpected keyword argument 'share'",
    ):
        call_definition(torch.nn.Dropout, part, KEY, share=0.5)
    with pytest.raises(
        InputError,
        match="dropout: dropout probability has to be between 0 and 1, but got 2",
    ):
        call_definition(torch.nn.Dropout, part, KEY, 2)

    def refuse() -> None:
        raise AssertionError

    with pytest.raises(InputError, match="dropout: AssertionError"):
        call_definition(refuse, part, KEY)
