"""Every way of writing a scenario wrongly gets one line: file, line, key, what is wrong, what would be right."""

from __future__ import annotations

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

GOOD = """\
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
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes) -> str:
        Path("small.yaml").write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )
        return "small.yaml"

    return write


def refusal(path: str, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


def test_reads_a_scenario(write):
    scenario = load(write(GOOD))
    assert scenario.network.link.rate == 50e6
    assert scenario.network.link.delay == 0.005
    assert scenario.workload.method.options() == {"schedule": "1f1b"}
    assert scenario.faults[0].at == 3.0
    assert scenario.source.where(("network", "link", "rate")) == "small.yaml:7"
    assert scenario.source.where(("faults", 0, "at")) == "small.yaml:16"
    assert scenario.source.where(("faults", 0, "for")) == "small.yaml:15"
    assert scenario.source.where(("workload", "data", "name")) == "small.yaml:8"


def test_the_resolved_scenario_reads_back_as_the_same(write):
    scenario = load(write(GOOD))
    again = validate(
        scenario.model_dump(mode="json", by_alias=True), Source("resolved")
    )
    assert again.model_dump() == scenario.model_dump()


def test_shipped_scenarios_load():
    names = scenarios_in()
    assert {"quickstart", "papers/stahl-example"} <= {*names}
    for name, file in names.items():
        assert load(name).name == file.stem


WRONG = [
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
    ("count: 2", '"[nt": 2', 4, "devices.worker.[nt: unknown key '[nt': choose one of"),
    (
        "workload:",
        "workloads:",
        8,
        "workloads: unknown key 'workloads': did you mean 'workload'?",
    ),
    ("  model: {name: mlp}\n", "", 8, "workload.model: is missing"),
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


@pytest.mark.parametrize(("old", "new", "number", "expected"), WRONG)
def test_names_line_key_and_remedy(write, old, new, number, expected):
    assert old in GOOD
    lines = refusal(write(GOOD.replace(old, new, 1)))
    assert lines[0].startswith(f"small.yaml:{number}: {expected}")
    assert all(re.match(r"small\.yaml:\d+: ", line) for line in lines)


def test_unquoted_condition_is_refused_with_quotes_suggested(write):
    (line,) = refusal(write(GOOD.replace('">= 0.9"', ">= 0.9")))
    assert "in quotes, as in accuracy: '>= 0.9'" in line


def test_all_problems_are_reported_in_the_order_of_the_file(write):
    lines = refusal(
        write(
            GOOD.replace("laptop", "[]")
            .replace("50mbit", "50")
            .replace("at: 3s", "at: soon")
        )
    )
    assert [line.split(": ")[:2] for line in lines] == [
        ["small.yaml:3", "devices.source.profile"],
        ["small.yaml:7", "network.link.rate"],
        ["small.yaml:16", "faults.0.at"],
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "small.yaml: is empty"),
        ("# nothing yet\n", "small.yaml: is empty"),
        ("- a\n- b\n", "small.yaml:1: is a list: a scenario is a mapping"),
        ("hello", "small.yaml:1: is a single value: a scenario is a mapping"),
        ("a: [1, 2\nb: 3\n", "small.yaml:2: is not YAML: "),
        ("a: 1\n---\nb: 2\n", "small.yaml:2: is not YAML: "),
        (b"\xff\xfe\x00", "small.yaml: is not text (byte 0 is not UTF-8)"),
        ("name: \x00", "small.yaml: is not YAML: "),
        ("a: " + "[" * 5000, "small.yaml"),
        ("a: &a [1,1,1,1,1,1,1,1]\n" + "".join(
            f"{new}: &{new} [{','.join([f'*{old}'] * 8)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
        ), "small.yaml: unfolds to more than 40000 values"),
    ],
)  # fmt: skip
def test_file_without_scenario_is_refused(write, text, expected):
    (line,) = refusal(write(text))
    assert line.startswith(expected)


def test_missing_file_is_refused(write, tmp_path):
    write(GOOD)
    (tmp_path / "scenarios" / "smoke").mkdir(parents=True)
    (tmp_path / "scenarios" / "quickstart.yaml").write_text(GOOD)
    (tmp_path / "scenarios" / "smoke" / "degrade.yaml").write_text(GOOD)
    assert load("quickstart").source.file == "scenarios/quickstart.yaml"
    assert load("smoke/degrade").source.file == "scenarios/smoke/degrade.yaml"
    assert load("smoke/degrade.yaml").source.file == "scenarios/smoke/degrade.yaml"
    assert refusal("quikstart") == [
        "quikstart: no such scenario: did you mean 'quickstart'?"
    ]
    assert refusal("degrade")[0].endswith("did you mean 'smoke/degrade'?")
    assert refusal("elsewhere/quickstart.yaml")[0].endswith(
        "did you mean 'quickstart'?"
    )
    assert refusal("scenarios/smoke/degrad.yaml")[0].endswith(
        "did you mean 'scenarios/smoke/degrade.yaml'?"
    )
    assert len(refusal("nothing-like-it")[0]) < 200
    assert refusal("scenarios") == [
        "scenarios: is a folder: name a scenario file in it"
    ]
    assert (
        "cannot be read" in refusal("small.yaml/x")[0]
        or "no such scenario" in refusal("small.yaml/x")[0]
    )


def test_the_testbeds_own_scenarios_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("quickstart").source.file == str(SHIPPED / "quickstart.yaml")
    assert refusal("quikstart")[0].endswith("did you mean 'quickstart'?")
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "quickstart.yaml").write_text(GOOD)
    assert load("quickstart").source.file == "scenarios/quickstart.yaml"


def test_yaml_1_2_scalars(write):
    text = GOOD.replace(
        "epochs: 1",
        "epochs: 0o10\n  training: {optimizer: {learning_rate: 1e-3, momentum: .5}}",
    )
    workload = load(write(text)).workload
    assert workload.epochs == 8
    assert workload.training.optimizer.learning_rate == 1e-3
    assert workload.training.optimizer.momentum == 0.5


def test_aliases_repeat_whole_values(write):
    text = GOOD.replace("{profile: laptop}", "&pi {profile: raspberry-pi-3b}").replace(
        "{profile: raspberry-pi-4b, count: 2}", "*pi"
    )
    assert load(write(text)).devices["worker"].profile == "raspberry-pi-3b"


def test_overrides_set_dotted_keys(write):
    path = write(GOOD)
    scenario = load(
        path,
        [
            "network.link.rate=10mbit",
            "network.link.loss=1%",
            "faults.0.at=7s",
            "workload.method.micro_batches=8",
            "expect.accuracy=>= 0.5",
            "devices.extra={profile: laptop}",
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
def test_overrides_are_refused_like_the_file(write, override, expected):
    assert refusal(write(GOOD), override)[0].startswith(expected)


def _only_input_errors(path: str) -> None:
    said = None
    try:
        load(path)
    except InputError as error:
        said = str(error)
    assert said is None or all(
        line.startswith("small.yaml") for line in said.split("\n")
    )


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
def test_garbage_is_refused_and_nothing_else(write, content):
    _only_input_errors(write(content))


WORDS = [
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
KEYS = st.sampled_from(WORDS)
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
def test_values_of_the_wrong_shape_are_refused(write, key, value):
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key}:")]
    _only_input_errors(write("\n".join([f"{key}: {json.dumps(value)}", *lines])))


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
def test_any_override_is_taken_or_refused(write, key, value):
    said = None
    try:
        load(write(GOOD), [f"{key}={value}"])
    except InputError as error:
        said = str(error)
    assert said is None or said.startswith(("--set", "small.yaml"))


@relaxed
@given(
    position=st.integers(0, len(GOOD) - 1),
    length=st.integers(0, 9),
    new=st.text(max_size=6),
)
def test_damaged_files_are_refused_or_read(write, position, length, new):
    _only_input_errors(write(GOOD[:position] + new + GOOD[position + length :]))


def test_duplicate_anchor_is_refused(write):
    with pytest.raises(
        InputError, match=r"^small.yaml:3: is not YAML: duplicate anchor: rename"
    ):
        load(write(GOOD.replace("small", "&a small").replace("laptop", "&a laptop")))


def test_a_trace_in_another_format_is_named_before_its_length(write, tmp_path):
    """Mahimahi files have one number a line, and often more lines than a trace may have."""
    (tmp_path / "lte.mahi").write_text("\n".join(map(str, range(20_000))))
    (line,) = refusal(write(GOOD + "\ntrace: lte.mahi\n"))
    assert "lte.mahi:1: '0' is not time,what,value" in line
