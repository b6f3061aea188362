"""Loading of scenario files and overrides; errors name file, line, key, problem and remedy."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.common.errors import InputError
from testbed.scenario.finding import SHIPPED, scenarios_in
from testbed.scenario.loading import load, validate
from testbed.scenario.schema import Source

VALID = """\
name: small
devices:
  source: {profile: laptop}
  worker: {profile: raspberry-pi-4b, count: 2}
network:
  topology: mesh
  link: {rate: 50mbit, delay: 5ms}
workload:
  model: {name: mlp}
  method:
    name: pipeline
    schedule: 1f1b
  epochs: 1
faults:
  - kill: worker1
    at: 3s
expect:
  accuracy: ">= 0.9"
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function for writing small.yaml in an empty working directory; the function returns the name."""
    monkeypatch.chdir(tmp_path)

    def write_scenario(text: str | bytes) -> str:
        content = text if isinstance(text, bytes) else text.encode()
        Path("small.yaml").write_bytes(content)
        return "small.yaml"

    return write_scenario


def error_lines(path: str, *overrides: str) -> list[str]:
    """Return the lines of the error with which a scenario is rejected."""
    with pytest.raises(InputError) as raised:
        load(path, overrides)
    assert raised.value.exit_code == 2
    return str(raised.value).split("\n")


def single_error(path: str, *overrides: str) -> str:
    (line,) = error_lines(path, *overrides)
    return line


def test_scenario_is_loaded_with_units_converted(write):
    scenario = load(write(VALID))
    assert scenario.network.link.rate == 50e6
    assert scenario.network.link.delay == 0.005
    assert scenario.workload.method.options() == {"schedule": "1f1b"}
    assert scenario.faults[0].at == 3.0


def test_source_locates_keys_and_enclosing_values_of_missing_keys(write):
    source = load(write(VALID)).source
    assert source.where(("network", "link", "rate")) == "small.yaml:7"
    assert source.where(("faults", 0, "at")) == "small.yaml:16"
    # Neither a duration of the fault nor data is in the file.
    assert source.where(("faults", 0, "for")) == "small.yaml:15"
    assert source.where(("workload", "data", "name")) == "small.yaml:8"


def test_dumped_scenario_is_valid_and_equal(write):
    scenario = load(write(VALID))
    # Results contain the dumped scenario.
    dumped = scenario.model_dump(mode="json", by_alias=True)
    reloaded = validate(dumped, Source("resolved"))
    assert reloaded.model_dump() == scenario.model_dump()


def test_shipped_scenarios_load():
    names = scenarios_in()
    assert {"quickstart", "papers/stahl-example"} <= {*names}
    for name, file in names.items():
        assert load(name).name == file.stem


INVALID = [
    # Old text, new text, line number and beginning of the error.
    # Units, keys and values.
    (
        "rate: 50mbit",
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
        "faults.0: a fault strikes at exactly one of 'at', 'when' and 'after'",
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
def test_error_names_line_key_and_remedy(write, old, new, line_number, expected):
    assert old in VALID
    lines = error_lines(write(VALID.replace(old, new, 1)))
    assert lines[0].startswith(f"small.yaml:{line_number}: {expected}")
    for line in lines:
        assert re.match(r"small\.yaml:\d+: ", line)


def test_quotes_are_suggested_for_unquoted_condition(write):
    # YAML reads ">" as the beginning of a folded text.
    error = single_error(write(VALID.replace('">= 0.9"', ">= 0.9")))
    assert "in quotes, as in accuracy: '>= 0.9'" in error


def test_all_errors_are_reported_in_order_of_file(write):
    text = VALID.replace("laptop", "[]")
    text = text.replace("50mbit", "50")
    text = text.replace("at: 3s", "at: soon")
    lines = error_lines(write(text))
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
def test_file_without_scenario_is_rejected(write, text, expected):
    assert single_error(write(text)).startswith(expected)


@pytest.fixture
def folder_of_scenarios(write, tmp_path):
    """Write small.yaml and a folder of scenarios in the working directory."""
    write(VALID)
    (tmp_path / "scenarios" / "smoke").mkdir(parents=True)
    (tmp_path / "scenarios" / "quickstart.yaml").write_text(VALID)
    (tmp_path / "scenarios" / "smoke" / "degrade.yaml").write_text(VALID)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quickstart", "scenarios/quickstart.yaml"),
        ("smoke/degrade", "scenarios/smoke/degrade.yaml"),
        ("smoke/degrade.yaml", "scenarios/smoke/degrade.yaml"),
    ],
)
def test_scenario_is_loaded_by_name_from_folder(folder_of_scenarios, name, file):
    assert load(name).source.file == file


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("quikstart", "no such scenario: did you mean 'quickstart'?"),
        ("degrade", "did you mean 'smoke/degrade'?"),
        ("elsewhere/quickstart.yaml", "did you mean 'quickstart'?"),
        (
            "scenarios/smoke/degrad.yaml",
            "did you mean 'scenarios/smoke/degrade.yaml'?",
        ),
    ],
)
def test_similar_name_is_suggested_for_missing_scenario(
    folder_of_scenarios, name, suggestion
):
    assert error_lines(name)[0].endswith(suggestion)


def test_error_without_similar_name_is_short(folder_of_scenarios):
    # It does not list all scenarios.
    assert len(error_lines("nothing-like-it")[0]) < 200


def test_folder_as_scenario_is_rejected(folder_of_scenarios):
    expected = "scenarios: is a folder: name a scenario file in it"
    assert error_lines("scenarios") == [expected]


def test_path_below_file_is_rejected(folder_of_scenarios):
    error = error_lines("small.yaml/x")[0]
    # The error of the operating system differs.
    assert "cannot be read" in error or "no such scenario" in error


def test_shipped_scenario_is_loaded_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("quickstart").source.file == str(SHIPPED / "quickstart.yaml")
    assert error_lines("quikstart")[0].endswith("did you mean 'quickstart'?")


def test_scenario_in_working_directory_precedes_shipped_scenario(folder_of_scenarios):
    assert load("quickstart").source.file == "scenarios/quickstart.yaml"


def test_scalars_follow_yaml_1_2(write):
    # YAML 1.1 has other octal numbers, and reads 1e-3 as text.
    training = "training: {optimizer: {learning_rate: 1e-3, momentum: .5}}"
    text = VALID.replace("epochs: 1", f"epochs: 0o10\n  {training}")
    workload = load(write(text)).workload
    assert workload.epochs == 8
    assert workload.training.optimizer.learning_rate == 1e-3
    assert workload.training.optimizer.momentum == 0.5


def test_alias_repeats_anchored_value(write):
    text = VALID.replace("{profile: laptop}", "&pi {profile: raspberry-pi-3b}")
    text = text.replace("{profile: raspberry-pi-4b, count: 2}", "*pi")
    assert load(write(text)).devices["worker"].profile == "raspberry-pi-3b"


def test_overrides_set_dotted_keys(write):
    path = write(VALID)
    scenario = load(
        path,
        [
            "network.link.rate=10mbit",
            "network.link.loss=1%",
            # Items of lists have indices.
            "faults.0.at=7s",
            "workload.method.micro_batches=8",
            "expect.accuracy=>= 0.5",
            "devices.extra={profile: laptop}",
            # Not parsed as a mapping, since the key is text.
            "description=a: b",
        ],
    )
    assert scenario.network.link.rate == 10e6
    assert scenario.network.link.loss == 0.01
    assert scenario.faults[0].at == 7.0
    assert scenario.workload.method.options()["micro_batches"] == 8
    assert scenario.expect["accuracy"] == ">= 0.5"
    assert scenario.devices["extra"].profile == "laptop"
    assert scenario.description == "a: b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "network.link.rate=10Mbps",
            "--set network.link.rate=10Mbps: network.link.rate: 'Mbps' is not a unit",
        ),
        (
            "netwrk.link.rate=10mbit",
            "--set netwrk.link.rate=10mbit: netwrk: unknown key 'netwrk': did you mean 'network'?",
        ),
        ("network.link.rate", "--set network.link.rate: must be KEY=VALUE"),
        ("=3", "--set =3: must be KEY=VALUE"),
        (
            "name.first=x",
            "--set name.first=x: name.first: unknown key: 'name' is a single value",
        ),
        (
            "faults.3.at=1s",
            "--set faults.3.at=1s: faults.3.at: unknown key: 'faults' has 1 item: use faults.0",
        ),
        (
            "faults=[{heal: all}]",
            "--set faults=[{heal: all}]: faults.0: a fault strikes at exactly one",
        ),
    ],
)
def test_invalid_override_is_rejected(write, override, expected):
    assert error_lines(write(VALID), override)[0].startswith(expected)


def assert_loads_or_is_rejected(path: str) -> None:
    """Load a scenario; any exception but an InputError whose lines all name the file fails the test."""
    message = None
    try:
        load(path)
    except InputError as error:
        message = str(error)
    if message is not None:
        for line in message.split("\n"):
            assert line.startswith("small.yaml")


# The fixture `write` overwrites its file, so that examples may share it.
relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@relaxed
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")),
    )
)
def test_arbitrary_content_is_rejected_or_loaded(write, content):
    assert_loads_or_is_rejected(write(content))


KEYS = st.sampled_from(
    [
        "name",
        "devices",
        "network",
        "link",
        "workload",
        "faults",
        "kill",
        "when",
        "sweep",
        "expect",
        "between",
        "x",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["5ms", "1%", "a", ""])
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@relaxed
@given(key=KEYS, value=TREES)
def test_value_of_any_shape_is_rejected_or_loaded(write, key, value):
    lines = [f"{key}: {json.dumps(value)}"]
    for line in VALID.splitlines():
        if not line.startswith(f"{key}:"):
            lines.append(line)
    assert_loads_or_is_rejected(write("\n".join(lines)))


@relaxed
@given(
    key=st.sampled_from(
        [
            "network.link.rate",
            "network.links.0",
            "faults.0.for",
            "faults.0.when.batch",
            "sweep",
            "expect.x",
            "a..b",
            "0",
            ".",
        ]
    ),
    value=st.text(max_size=12),
)
def test_any_override_is_applied_or_rejected(write, key, value):
    message = None
    try:
        load(write(VALID), [f"{key}={value}"])
    except InputError as error:
        message = str(error)
    if message is not None:
        assert message.startswith(("--set", "small.yaml"))


@relaxed
@given(
    position=st.integers(0, len(VALID) - 1),
    length=st.integers(0, 9),
    new=st.text(max_size=6),
)
def test_damaged_file_is_rejected_or_loaded(write, position, length, new):
    damaged = VALID[:position] + new + VALID[position + length :]
    assert_loads_or_is_rejected(write(damaged))


def test_duplicate_anchor_is_rejected(write):
    text = VALID.replace("small", "&a small").replace("laptop", "&a laptop")
    error = single_error(write(text))
    assert error.startswith("small.yaml:3: is not YAML: duplicate anchor: rename")


def test_link_trace_format_is_checked_before_length(write, tmp_path):
    # Files of Mahimahi have one number a line, and often more lines than a link trace may have.
    (tmp_path / "lte.mahi").write_text("\n".join(map(str, range(20_000))))
    error = single_error(write(VALID + "\ntrace: lte.mahi\n"))
    assert "lte.mahi:1: '0' is not time,what,value" in error
