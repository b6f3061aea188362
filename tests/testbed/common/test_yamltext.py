"""Reading and writing of scenarios as YAML 1.2 with its core schema."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.yamltext import MAX_DEPTH, nodes, values, written

# YAML 1.1 reads several of these as booleans, dates or numbers to the base of 60.
WORDS: dict[str, Any] = {
    "yes": "yes",
    "off": "off",
    "1:30": "1:30",
    "1_000": "1_000",
    "2026-01-31": "2026-01-31",
    "=": "=",
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
    "-7": -7,
    "+7": 7,
    "0x1F": 31,
    "0o17": 15,
    "12e3": 12000.0,
    ".5": 0.5,
    "-1.": -1.0,
    "-.inf": -math.inf,
}


@pytest.mark.parametrize("word", WORDS)
def test_plain_scalar_has_type_of_core_schema(word: str) -> None:
    value = values(f"a: {word}")["a"]
    assert value == WORDS[word]
    # True and 1 are equal in Python.
    assert type(value) is type(WORDS[word])


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.sampled_from([*WORDS]),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        ),
    ),
    st.booleans(),
)
def test_written_value_is_read_back(value: Any, lines: bool) -> None:
    assert values(written(value, lines=lines)) == value


def test_repeated_value_is_written_without_alias() -> None:
    shared = [1]
    assert written({"a": shared, "b": shared}) == "a:\n- 1\nb:\n- 1\n"


# The larger depths would overflow the stack of libyaml, which ends the process.
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 17_000, 100_000])
@pytest.mark.parametrize(
    ("opening", "closing"), [("[", "]"), ("{a: ", "}"), ("- ", "")]
)
def test_too_deep_nesting_is_refused(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        nodes(opening * depth + "1" + closing * depth)
