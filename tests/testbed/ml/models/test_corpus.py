"""Small public architectures: tracing, cuts into units, and equal outputs of parts and whole.

`make corpus` checks all architectures.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.corpus.architectures import (
    Architecture,
    assert_parts_equal_whole,
    has_torchvision,
    torch_architectures,
    torchvision_architectures,
    transformers_architectures,
)

INDIVISIBLE = ("Bag",)
"""Architectures with one embedding and one product, which are one unit."""


def assert_divisible(architecture: Architecture) -> None:
    model = architecture.model()
    units = len(model.units)
    least = 1 if architecture.name in INDIVISIBLE else 2
    assert units >= max(architecture.layers, least)
    # One part for each unit.
    every_cut = list(range(units + 1))
    assert_parts_equal_whole(architecture, model, every_cut)


def select(architectures: list[Architecture], name: str) -> Architecture:
    (match,) = [network for network in architectures if network.name == name]
    return match


@pytest.mark.parametrize(
    "architecture", torch_architectures(), ids=lambda network: network.name
)
def test_plain_torch_network_is_divided(architecture: Architecture) -> None:
    assert_divisible(architecture)


@pytest.mark.skipif(
    not importlib.util.find_spec("torchvision"),
    reason="needs torchvision: the extra `vision`",
)
def test_torchvision_network_is_divided() -> None:
    assert has_torchvision()
    assert_divisible(select(torchvision_architectures(), "squeezenet1_1"))


@pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="needs the extra `transformers`",
)
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_transformers_network_is_divided(name: str) -> None:
    # transformers imports torchvision; has_vision makes a build for another torch importable.
    has_torchvision()
    assert_divisible(select(transformers_architectures(2), name))
