"""The registry of an extension point."""

from __future__ import annotations

import collections

import pytest

from testbed.common.errors import InputError
from testbed.common.plugins import Registry, subclass_of, summarize

# Plugins of installed packages are covered by tests/controller/test_extending.py.
REGISTRY = Registry(
    "testbed.none",
    {"ordered": "collections:OrderedDict", "deque": "collections:deque"},
    "mapping",
    subclass_of(dict),
)


def test_registered_object_is_imported_by_name() -> None:
    assert list(REGISTRY) == ["ordered", "deque"]
    assert "ordered" in REGISTRY
    assert REGISTRY.find("ordered") is collections.OrderedDict


def test_unknown_name_is_refused_with_suggestion() -> None:
    with pytest.raises(
        InputError, match=r"a.b: unknown mapping 'order': did you mean 'ordered'\?"
    ):
        REGISTRY.find("order", ("a", "b"))


def test_object_of_wrong_class_is_refused() -> None:
    # The registry accepts subclasses of dict.
    with pytest.raises(
        TypeError, match=r"deque.* must be a subclass of builtins\.dict"
    ):
        REGISTRY.find("deque")


def test_summary_is_first_paragraph_of_own_docstring() -> None:
    class Documented:
        """A network
        of one layer.

        Its weights are drawn.
        """

    class Undocumented(Documented):
        pass

    assert summarize(Documented) == "A network of one layer."
    # The docstring of the base class does not describe the subclass.
    assert summarize(Undocumented) == ""
