"""The registry of an extension point; packages are in tests/controller/test_extending.py."""

from __future__ import annotations

import collections

import pytest

from testbed.common.errors import InputError
from testbed.common.plugins import Registry, subclass_of

REGISTRY = Registry(
    "testbed.none",
    {"ordered": "collections:OrderedDict", "deque": "collections:deque"},
    "mapping",
    subclass_of(dict),
)


def test_own_objects_are_imported_by_name() -> None:
    assert list(REGISTRY) == ["ordered", "deque"]
    assert "ordered" in REGISTRY
    assert REGISTRY.find("ordered") is collections.OrderedDict


def test_an_unknown_name_and_an_unsuitable_object_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"a.b: unknown mapping 'order': did you mean 'ordered'\?"
    ):
        REGISTRY.find("order", ("a", "b"))
    with pytest.raises(
        TypeError, match=r"deque.* must be a subclass of builtins\.dict"
    ):
        REGISTRY.find("deque")
