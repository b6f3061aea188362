"""No file makes the loader fail otherwise than in its own words, or takes long: every number has a bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.common import yamltext
from testbed.common.errors import InputError, Key
from testbed.methods import METHODS
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.explaining import published_schema
from testbed.scenario.loading import load
from tests.helpers import ROOT

SECONDS = 2.0
"""Of the processor's time, for whatever a file holds."""
HEAD = "name: x\ndevices: {a: {}, b: {count: 2}}\n"
WORK = (
    "workload: {model: {name: mlp}, data: {name: synthetic-1x8x8, train: 64, test: 8}, method: {name: single}, "
    "steps: 5}\n"
)


def answer(file: Path) -> str:
    """Return what is wrong with a file, and nothing where it can be run; takes its time into account."""
    began = time.process_time()
    try:
        for trial in trials(load(file)):
            prepare(trial)
    except InputError as error:
        return str(error)
    finally:
        assert time.process_time() - began < SECONDS
    return ""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            HEAD
            + WORK.replace(
                "steps: 5", f"task: infer, batch_size: 1{'0' * 400}"
            ).replace("single", "distributed"),
            "x.yaml:3: workload.batch_size: '1000",
        ),
        (
            HEAD
            + WORK
            + "network: {link: {preset: 802.15.4}, radio: {area: [50, 50], packets: 1000000000}}",
            "x.yaml:4: network.radio.packets: '1000000000' must be at most 1e+06",
        ),
        (
            HEAD + WORK.replace("train: 64", r'path: "a\0b"'),
            "x.yaml:3: workload.data.path: contains a NUL character",
        ),
        (
            HEAD + WORK.replace("64", "200000000"),
            "workload.data.train: '200000000' must be at most 2e+06",
        ),
        (
            HEAD.replace("2", "1_0") + WORK,
            "x.yaml:2: devices.b.count: '1_0' must be a whole number",
        ),
        (
            HEAD + WORK + "seed: 99999999999999999999",
            "seed: '99999999999999999999' must be at most 9.22337e+18",
        ),
        (
            HEAD + WORK + "network: {link: {rate: 1_0mbit}}",
            "'_0mbit' is not a unit of rate",
        ),
        (
            HEAD + WORK + "network: {link: {rate: 1e30gbit}}",
            "is too large for a rate: it is at most 1e+18 bit",
        ),
        (HEAD + WORK + "network: {radio: {area: [1e13, 5]}}", "must be at most 1e+12"),
        (
            HEAD.replace("2", "1000}, c: {count: 500") + WORK,
            "x.yaml:2: devices: are 1,501, more than 2,000,000 links",
        ),
        (
            HEAD + WORK + "points: [" + "1," * 200_000 + "1]",
            "more than 35,000 lines, commas and opening brackets",
        ),
    ],
)
def test_excessive_input_is_refused_in_one_line(
    tmp_path: Path, text: str, wrong: str
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert wrong in answer(file)


def numbers(schema: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every number that a JSON schema describes."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield key, schema
        for name, inner in schema.items():
            yield from numbers(inner, f"{key}.{name}")
    elif isinstance(schema, list):
        for each in schema:
            yield from numbers(each, key)


def test_every_number_has_a_bound_in_the_schema() -> None:
    schemas = {"": published_schema()} | {
        name: each.Options.model_json_schema() for name, each in METHODS.items()
    }
    unbound = [
        (name, key)
        for name, schema in schemas.items()
        for key, number in numbers(schema)
        if not {"maximum", "exclusiveMaximum"} & number.keys()
    ]
    # What a publication prints, and the places on a plot's axis, are shown and not computed with.
    assert [each for each in unbound if ".Paper" not in each[1]] == []


SCENARIOS = [
    *sorted((ROOT / "scenarios" / "smoke").glob("*.yaml")),
    ROOT / "scenarios" / "quickstart.yaml",
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from(
        [0, -1, 2**31, 2**63, 10**400, 1e300, 1e-300, float("inf"), float("nan")]
    ),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        [
            "1_000",
            "0x10",
            "1e9s",
            "-5ms",
            "9e99gbit",
            "101%",
            "\0",
            "../..",
            "a" * 5000,
            "${x}",
            "devices",
        ]
    ),
    st.lists(st.integers() | st.text(max_size=5), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def places(tree: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the key of every value in plain nested values."""
    for name, inner in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield (*key, name)
        yield from places(inner, (*key, name))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_file_with_any_values_anywhere_is_run_or_refused(
    tmp_path: Path, data: st.DataObject
) -> None:
    original = data.draw(st.sampled_from(SCENARIOS))
    tree = deepcopy(yamltext.values(original.read_text()))
    for _ in range(data.draw(st.integers(1, 3))):
        *outer, last = data.draw(st.sampled_from(list(places(tree))))
        place = tree
        for name in outer:
            place = place[name]
        place[last] = data.draw(ODD)
    file = tmp_path / "fuzzed.yaml"
    file.write_text(yamltext.written(tree))
    answer(file)
