"""Public architectures in small: traced, cut into units, and the same in parts as whole; `make corpus` does all."""

from __future__ import annotations

import importlib.util

import pytest

from tests.corpus.architectures import (
    Architecture,
    check,
    has_vision,
    language,
    plain,
    vision,
)

UNCUT = ("Bag",)
"""Of one embedding and one product."""


def is_cut(each: Architecture) -> None:
    model = each.model()
    units = len(model.units)
    assert units >= max(each.layers, 1 if each.name in UNCUT else 2)
    check(each, model, [*range(units + 1)])


@pytest.mark.parametrize("each", plain(), ids=lambda each: each.name)
def test_a_network_of_plain_torch_is_cut(each: Architecture) -> None:
    is_cut(each)


@pytest.mark.skipif(
    not importlib.util.find_spec("torchvision"),
    reason="needs torchvision: the extra `vision`",
)
def test_a_network_of_torchvision_is_cut() -> None:
    assert has_vision()
    is_cut(next(each for each in vision() if each.name == "squeezenet1_1"))


@pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="needs the extra `transformers`",
)
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_network_of_transformers_is_cut(name: str) -> None:
    has_vision()
    is_cut(next(each for each in language(2) if each.name == name))
