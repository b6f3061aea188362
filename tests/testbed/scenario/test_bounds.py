"""Unusual and excessive scenario files are rejected quickly with an `InputError`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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

MAX_SECONDS = 2.0
"""Processor time for any file."""
HEAD = "name: x\ndevices: {a: {}, b: {count: 2}}\n"
WORK = (
    "workload: {model: {name: mlp}, data: {name: synthetic-1x8x8, train: 64, test: 8}, method: {name: single}, "
    "steps: 5}\n"
)


def prepare_file(file: Path) -> str:
    """Prepare all trials of a file within the maximum time; return the error message, or nothing."""
    began = time.process_time()
    try:
        for trial in trials(load(file)):
            prepare(trial)
    except InputError as error:
        return str(error)
    finally:
        assert time.process_time() - began < MAX_SECONDS
    return ""


LONG_BATCH_SIZE = f"task: infer, batch_size: 1{'0' * 400}"
LONG_BATCHES = WORK.replace("steps: 5", LONG_BATCH_SIZE)
MANY_PACKETS = (
    "network: {link: {preset: 802.15.4}, radio: {area: [50, 50], packets: 1000000000}}"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEAD + LONG_BATCHES.replace("single", "distributed"),
            "x.yaml:3: workload.batch_size: '1000",
        ),
        (
            HEAD + WORK + MANY_PACKETS,
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
        # Python's int accepts underscores, YAML 1.2 does not.
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
            "x.yaml:2: devices: a mesh of 1,501 devices has more than 2,000,000 links",
        ),
        # The size is limited before the text is parsed.
        (
            HEAD + WORK + "points: [" + "1," * 200_000 + "1]",
            "more than 35,000 lines, commas and opening brackets",
        ),
    ],
)
def test_excessive_value_is_rejected_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    assert message in prepare_file(file)


def numbers_in(schema: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and description of every number in a JSON schema."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield key, schema
        for name, inner in schema.items():
            yield from numbers_in(inner, f"{key}.{name}")
    elif isinstance(schema, list):
        for item in schema:
            yield from numbers_in(item, key)


def test_every_number_in_schema_has_maximum() -> None:
    schemas = {"": published_schema()}
    for name, method in METHODS.items():
        schemas[name] = method.Options.model_json_schema()
    unbounded = []
    for name, schema in schemas.items():
        for key, number in numbers_in(schema):
            # Values of publications are shown in plots and not computed with.
            is_shown_only = ".Paper" in key
            has_maximum = "maximum" in number or "exclusiveMaximum" in number
            if not has_maximum and not is_shown_only:
                unbounded.append((name, key))
    assert unbounded == []


SCENARIOS = [
    *sorted((ROOT / "scenarios" / "smoke").glob("*.yaml")),
    ROOT / "scenarios" / "quickstart.yaml",
]
UNUSUAL_VALUES = st.one_of(
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


def keys_in(tree: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the key of every value in nested mappings and lists."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for name, inner in items:
        yield (*key, name)
        yield from keys_in(inner, (*key, name))


def replace_value(tree: Any, key: Key, value: Any) -> None:
    *outer, last = key
    for name in outer:
        tree = tree[name]
    tree[last] = value


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_scenario_with_unusual_values_is_prepared_or_rejected(
    tmp_path: Path, data: st.DataObject
) -> None:
    original = data.draw(st.sampled_from(SCENARIOS))
    tree = deepcopy(yamltext.values(original.read_text()))
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(list(keys_in(tree))))
        # A replaced mapping loses its keys, so that keys are listed anew each time.
        replace_value(tree, key, data.draw(UNUSUAL_VALUES))
    file = tmp_path / "fuzzed.yaml"
    file.write_text(yamltext.written(tree))
    # Any other exception fails the test.
    prepare_file(file)
