"""Loading of scenario files: values, positions, YAML 1.2 and overrides."""

from __future__ import annotations

import pytest

from testbed.scenario.finding import scenarios_in
from testbed.scenario.loading import load, validate
from testbed.scenario.schema import Source
from tests.testbed.scenario.loading_scenario import VALID, error_lines


def test_scenario_is_loaded_with_units_converted(write_scenario):
    scenario = load(write_scenario(VALID))
    assert scenario.network.link.rate == 50e6
    assert scenario.network.link.delay == 0.005
    assert scenario.workload.method.options() == {"schedule": "1f1b"}
    assert scenario.faults[0].at == 3.0


def test_source_locates_keys_and_enclosing_values_of_missing_keys(write_scenario):
    source = load(write_scenario(VALID)).source
    assert source.where(("network", "link", "rate")) == "small.yaml:7"
    assert source.where(("faults", 0, "at")) == "small.yaml:16"
    # Neither a duration of the fault nor data is in the file.
    assert source.where(("faults", 0, "for")) == "small.yaml:15"
    assert source.where(("workload", "data", "name")) == "small.yaml:8"


def test_dumped_scenario_is_valid_and_equal(write_scenario):
    scenario = load(write_scenario(VALID))
    # Results contain the dumped scenario.
    dumped = scenario.model_dump(mode="json", by_alias=True)
    reloaded = validate(dumped, Source("resolved"))
    assert reloaded.model_dump() == scenario.model_dump()


def test_shipped_scenarios_load():
    names = scenarios_in()
    assert {"quickstart", "papers/stahl-example"} <= {*names}
    for name, file in names.items():
        assert load(name).name == file.stem


def test_scalars_follow_yaml_1_2(write_scenario):
    # YAML 1.1 has other octal numbers, and reads 1e-3 as text.
    training = "training: {optimizer: {learning_rate: 1e-3, momentum: .5}}"
    text = VALID.replace("epochs: 1", f"epochs: 0o10\n  {training}")
    workload = load(write_scenario(text)).workload
    assert workload.epochs == 8
    assert workload.training.optimizer.learning_rate == 1e-3
    assert workload.training.optimizer.momentum == 0.5


def test_alias_repeats_anchored_value(write_scenario):
    text = VALID.replace("{profile: laptop}", "&pi {profile: raspberry-pi-3b}")
    text = text.replace("{profile: raspberry-pi-4b, count: 2}", "*pi")
    assert load(write_scenario(text)).devices["worker"].profile == "raspberry-pi-3b"


def test_overrides_set_dotted_keys(write_scenario):
    path = write_scenario(VALID)
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
            "--set faults=[{heal: all}]: faults.0: a fault needs exactly one",
        ),
    ],
)
def test_invalid_override_is_rejected(write_scenario, override, expected):
    assert error_lines(write_scenario(VALID), override)[0].startswith(expected)
