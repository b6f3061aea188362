"""The registry of an extension point; packages are in tests/controller/test_extending.py."""

from __future__ import annotations

import collections

import pytest

from testbed.common.errors import InputError
from testbed.common.plugins import Registry, subclass_of, summarize

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


def test_summary_is_the_first_paragraph_of_a_docstring_of_its_own() -> None:
    class Documented:
        """A network
        of one layer.

        Its weights are drawn.
        """

    class Undocumented(Documented):
        pass

    assert summarize(Documented) == "A network of one layer."
    assert summarize(Undocumented) == "", "not the one of its base class"
