"""Examples in the docstrings of methods in timeslots: each is true when a reader pastes it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import testbed.ml.slots
import testbed_edgepipe
import testbed_versatilefl


def modules():
    packages = (testbed.ml.slots, testbed_edgepipe, testbed_versatilefl)
    return [
        module.name
        for package in packages
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]


@pytest.mark.parametrize("name", modules())
def test_examples_of_a_module_are_true(name):
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS
    )
    assert results.failed == 0
