"""YAML 1.2 as scenarios have it: what its core schema says a word is, and that values come back as they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from testbed.common.yamltext import DEEPEST, nodes, values, written

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
def test_words_have_types_of_the_core_schema(word: str) -> None:
    assert values(f"a: {word}")["a"] == WORDS[word]
    assert type(values(f"a: {word}")["a"]) is type(WORDS[word])


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
def test_written_values_are_read_back(plain: Any, lines: bool) -> None:
    assert values(written(plain, lines=lines)) == plain


def test_repeated_value_is_written_without_alias() -> None:
    shared = [1]
    assert written({"a": shared, "b": shared}) == "a:\n- 1\nb:\n- 1\n"


@pytest.mark.parametrize("deep", [DEEPEST + 1, 17_000, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ("{a: ", "}"), ("- ", "")])
def test_deep_nesting_is_refused(deep: int, opened: str, closed: str) -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        nodes(opened * deep + "1" + closed * deep)
