"""Errors of scenario files name file, line, key, problem and remedy."""

from __future__ import annotations

import itertools
import re

import pytest

from tests.testbed.scenario.loading_scenario import VALID, error_lines, single_error

INVALID = [
    # Old text, new text, line number and beginning of the error.
    # Units, keys and values.
    (
        "rate: 50mbit",
        # In tc, bits are "mbit" and "Mbps" are bytes.
        "rate: 100Mbps",
        7,
        "network.link.rate: 'Mbps' is not a unit of rate: tc reads 'Mbps' as bytes",
    ),
    (
        "rate: 50mbit",
        "rate: 50",
        7,
        "network.link.rate: '50' has no unit: a rate is written like '50mbit'",
    ),
    (
        "delay: 5ms",
        "dlay: 5ms",
        7,
        "network.link.dlay: unknown key 'dlay': did you mean 'delay'?",
    ),
    (
        "  topology: m",
        "  topolgy: m",
        6,
        "network.topolgy: unknown key 'topolgy': did you mean 'topology'?",
    ),
    (
        "mesh",
        "ring",
        6,
        "network.topology: invalid value 'ring': choose one of mesh, star, line, explicit",
    ),
    (
        "mesh",
        # An address with host bits.
        "mesh\n  subnet: 10.1.2.3/16",
        7,
        "network.subnet: '10.1.2.3/16' is not a range of addresses (10.1.2.3/16 has",
    ),
    (
        "mesh",
        "mesh\n  subnet: all",
        7,
        "network.subnet: 'all' is not a range of addresses",
    ),
    (
        "count: 2",
        "cont: 2",
        4,
        "devices.worker.cont: unknown key 'cont': did you mean 'count'?",
    ),
    # Suggestions must not treat a key as a pattern.
    ("count: 2", '"[nt": 2', 4, "devices.worker.[nt: unknown key '[nt': choose one of"),
    ("count: 2", "count: 0", 4, "devices.worker.count: '0' must be at least 1"),
    ("count: 2", "count: two", 4, "devices.worker.count: 'two' must be a whole number"),
    (
        "  worker:",
        "  Worker:",
        4,
        "devices.Worker: 'Worker' must be a name: lower-case letters, digits and dashes",
    ),
    # Faults, conditions and missing keys.
    (
        "    at: 3s",
        "    at: 3s\n    when: {device: worker1, begins: backward}",
        15,
        "faults.0: a fault needs exactly one of 'at', 'when' and 'after'",
    ),
    (
        "  - kill: worker1\n",
        "  - kill: worker1\n    pause: worker2\n",
        15,
        "faults.0: a fault has exactly one of kill,",
    ),
    (
        "    at: 3s",
        "    at: 3",
        16,
        "faults.0.at: '3' has no unit: a duration is written like '5ms'",
    ),
    (
        '">= 0.9"',
        "0.9",
        18,
        "expect.accuracy: '0.9' must be text: write a condition such as '>= 0.9'",
    ),
    (
        "  epochs: 1",
        "",
        8,
        "workload: a training workload needs exactly one of 'epochs' and 'steps'",
    ),
    (
        "workload:",
        "workloads:",
        8,
        "workloads: unknown key 'workloads': did you mean 'workload'?",
    ),
    ("  model: {name: mlp}\n", "", 8, "workload.model: is missing"),
    # Syntax of YAML: duplicates, tags, tabs, quotes, aliases and merging.
    (
        "name: small",
        "name: small\nname: other",
        2,
        "name: duplicate key, first defined in line 1: remove one",
    ),
    (
        "{name: mlp}",
        "{name: !!python/name:os.system }",
        9,
        "workload.model.name: has the tag '!!python/name:os.system': a scenario needs no tags, write the plain value",
    ),
    ("  epochs: 1", "\tepochs: 1", 13, "is not YAML: "),
    ('">= 0.9"', ">= 0.9", 18, "is not YAML: "),
    (
        "devices:\n",
        # A list or mapping that contains itself would unfold for ever.
        "devices: &all\n  more: *all\n",
        3,
        "devices.more: is an alias of something that contains it",
    ),
    (
        "{profile: laptop}",
        "&s {profile: laptop}\n  x: {<<: *s}",
        4,
        "devices.x.<<: merging with '<<' is not YAML 1.2",
    ),
]


@pytest.mark.parametrize(("old", "new", "line_number", "expected"), INVALID)
def test_error_names_line_key_and_remedy(
    write_scenario, old, new, line_number, expected
):
    assert old in VALID
    lines = error_lines(write_scenario(VALID.replace(old, new, 1)))
    assert lines[0].startswith(f"small.yaml:{line_number}: {expected}")
    for line in lines:
        assert re.match(r"small\.yaml:\d+: ", line)


def test_quotes_are_suggested_for_unquoted_condition(write_scenario):
    # YAML reads ">" as the beginning of a folded text.
    error = single_error(write_scenario(VALID.replace('">= 0.9"', ">= 0.9")))
    assert "in quotes, as in accuracy: '>= 0.9'" in error


def test_all_errors_are_reported_in_order_of_file(write_scenario):
    text = VALID.replace("laptop", "[]")
    text = text.replace("50mbit", "50")
    text = text.replace("at: 3s", "at: soon")
    lines = error_lines(write_scenario(text))
    assert [line.split(": ")[:2] for line in lines] == [
        ["small.yaml:3", "devices.source.profile"],
        ["small.yaml:7", "network.link.rate"],
        ["small.yaml:16", "faults.0.at"],
    ]


# Each list repeats the previous one eight times: seven levels unfold to 8^7 values.
EXPONENTIAL_ALIASES = "a: &a [1,1,1,1,1,1,1,1]\n"
for old_name, new_name in itertools.pairwise("abcdefg"):
    aliases = ",".join([f"*{old_name}"] * 8)
    EXPONENTIAL_ALIASES += f"{new_name}: &{new_name} [{aliases}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "small.yaml: is empty", id="empty"),
        pytest.param("# nothing yet\n", "small.yaml: is empty", id="comment"),
        pytest.param(
            "- a\n- b\n", "small.yaml:1: is a list: a scenario is a mapping", id="list"
        ),
        pytest.param(
            "hello",
            "small.yaml:1: is a single value: a scenario is a mapping",
            id="single-value",
        ),
        pytest.param(
            "a: [1, 2\nb: 3\n", "small.yaml:2: is not YAML: ", id="open-bracket"
        ),
        pytest.param(
            "a: 1\n---\nb: 2\n", "small.yaml:2: is not YAML: ", id="two-documents"
        ),
        pytest.param(
            b"\xff\xfe\x00",
            "small.yaml: is not text (byte 0 is not UTF-8)",
            id="binary",
        ),
        pytest.param("name: \x00", "small.yaml: is not YAML: ", id="nul"),
        pytest.param("a: " + "[" * 5000, "small.yaml", id="deep-nesting"),
        pytest.param(
            EXPONENTIAL_ALIASES,
            "small.yaml: unfolds to more than 40000 values",
            id="exponential-aliases",
        ),
    ],
)
def test_file_without_scenario_is_rejected(write_scenario, text, expected):
    assert single_error(write_scenario(text)).startswith(expected)


def test_duplicate_anchor_is_rejected(write_scenario):
    text = VALID.replace("small", "&a small").replace("laptop", "&a laptop")
    error = single_error(write_scenario(text))
    assert error.startswith("small.yaml:3: is not YAML: duplicate anchor: rename")


def test_link_trace_format_is_checked_before_length(write_scenario, tmp_path):
    # Files of Mahimahi have one number a line, and often more lines than a link trace may have.
    (tmp_path / "lte.mahi").write_text("\n".join(map(str, range(20_000))))
    error = single_error(write_scenario(VALID + "\ntrace: lte.mahi\n"))
    assert "lte.mahi:1: '0' is not time,what,value" in error
