"""Expansion of scenarios into trials: devices, links, sweeps and their error messages."""

from __future__ import annotations

import re

import pytest

from testbed.common.errors import InputError
from testbed.hardware import PROFILES
from testbed.network.link import Link, directed_pairs
from testbed.network.parts import PRESETS
from testbed.scenario.expand import trials
from testbed.scenario.loading import validate
from testbed.scenario.schema import Source

BASE = {
    "name": "small",
    "seed": 7,
    "devices": {"source": {}, "worker": {"profile": "raspberry-pi-4b", "count": 3}},
    "workload": {"model": {"name": "mlp"}, "method": {"name": "single"}, "steps": 1},
}


def expand(**parts):
    """Expand the base scenario with other parts into trials."""
    return trials(validate({**BASE, **parts}, Source("small.yaml")))


def expand_experiment(**parts):
    """Return the experiment of a scenario with one trial."""
    (trial,) = expand(**parts)
    return trial.experiment


def error_of(**parts) -> str:
    with pytest.raises(InputError) as raised:
        expand(**parts)
    return str(raised.value)


MANY_COMBINATIONS = {f"workload.method.{name}": list(range(100)) for name in "abcdefgh"}


# 10^9 repetitions, 100^8 combinations, and 101 points of 100 repetitions.
@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"repetitions": 10**9}, "repetitions"),
        ({"sweep": MANY_COMBINATIONS}, "sweep"),
        ({"points": [{"seed": 1}] * 101, "repetitions": 100}, "points"),
    ],
    ids=["repetitions", "sweep", "points"],
)
def test_too_many_runs_are_rejected_without_expanding_them(parts, key) -> None:
    message = error_of(**parts)
    assert re.search(rf"{key}: makes .* runs, more than 10,000: use fewer", message)


def test_counted_devices_are_numbered_from_one():
    # A count of one is numbered, and no count is not.
    devices = {"source": {}, "worker": {"count": 2}, "single": {"count": 1}}
    experiment = expand_experiment(devices=devices)
    names = [device.name for device in experiment.devices]
    assert names == ["source", "worker1", "worker2", "single1"]


def test_keys_of_device_override_profile():
    keys = {"profile": "raspberry-pi-3b", "memory": "512MiB", "cpus": 0.5}
    (device,) = expand_experiment(devices={"a": keys}).devices
    assert device.speed == PROFILES["raspberry-pi-3b"].speed
    assert device.memory == 512 * 2**20
    assert device.cpus == 0.5
    assert device.profile == "raspberry-pi-3b"


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            {"a": {"profile": "raspbery-pi-4b"}},
            "unknown profile 'raspbery-pi-4b': did you mean 'raspberry-pi-4b'?",
        ),
        (
            # The first device of the group has the same name.
            {"a1": {}, "a": {"count": 1}},
            "a second device would be called 'a1': rename one of the two",
        ),
        # 30 letters and the number 10; interfaces and host names are limited.
        ({"a" * 30: {"count": 10}}, "is longer than 31 characters: shorten the name"),
    ],
)
def test_invalid_devices_are_rejected(devices, message):
    assert message in error_of(devices=devices)


def test_pairs_of_topologies():
    names = ["a", "b", "c"]
    a_and_b = {("a", "b"), ("b", "a")}
    a_and_c = {("a", "c"), ("c", "a")}
    b_and_c = {("b", "c"), ("c", "b")}
    assert set(directed_pairs("mesh", names)) == a_and_b | a_and_c | b_and_c
    # The hub is the first device.
    assert set(directed_pairs("star", names)) == a_and_b | a_and_c
    assert set(directed_pairs("line", names)) == a_and_b | b_and_c
    assert directed_pairs("explicit", names) == []


@pytest.mark.parametrize("topology", ["mesh", "star", "line"])
def test_single_device_has_no_links(topology):
    assert directed_pairs(topology, ["a"]) == []


def test_link_overrides_apply_in_order_after_default():
    links = expand_experiment(
        network={
            "link": {"rate": "50mbit", "delay": "5ms", "loss": "1%"},
            "links": [
                {"between": ["worker1", "worker2"], "preset": "wifi", "delay": "7ms"},
                {"from": "worker1", "to": "worker2", "rate": "1mbit"},
            ],
        }
    ).links
    # Four devices in a mesh.
    assert len(links) == 4 * 3
    assert links["source", "worker1"] == Link(rate=50e6, delay=0.005, loss=0.01)
    assert links["worker2", "worker1"] == Link(rate=50e6, delay=0.007, loss=0.01)
    assert links["worker1", "worker2"] == Link(rate=1e6, delay=0.007, loss=0.01)


def test_preset_has_uplink_toward_first_device_and_downlink_from_it():
    network = {"link": {"preset": "4g", "delay": "20ms"}}
    links = expand_experiment(network=network).links
    assert links["worker1", "source"] == Link(rate=10e6, delay=0.02)
    assert links["source", "worker1"] == Link(rate=25e6, delay=0.02)
    # Between other devices, the uplink is the bottleneck.
    assert links["worker1", "worker2"] == Link(rate=10e6, delay=0.02)


def test_access_preset_limits_all_links_of_device():
    devices = {
        "a": {},
        "phone": {"access": "4g"},
        "other": {"access": "4g", "uplink": "5mbit"},
    }
    network = {"link": {"rate": "50mbit"}}
    experiment = expand_experiment(devices=devices, network=network)
    limits = [(device.uplink, device.downlink) for device in experiment.devices]
    assert limits == [(None, None), (10e6, 25e6), (5e6, 25e6)]
    links = experiment.bounded_links()
    assert links["phone", "a"].rate == 10e6
    assert links["a", "phone"].rate == 25e6
    assert links["phone", "other"].rate == 10e6


def test_unknown_access_preset_is_rejected():
    message = error_of(devices={"a": {"access": "4h"}})
    expected = "devices.a.access: unknown preset '4h': choose one of ethernet-10, "
    assert expected in message


def test_keys_of_link_override_preset():
    network = {"link": {"preset": "lan", "rate": "3mbit"}}
    links = expand_experiment(network=network).links
    assert links["source", "worker1"] == Link(rate=3e6, delay=PRESETS["lan"].delay)


def test_frame_size_applies_to_every_link():
    network = {
        "frame": "127B",
        "links": [{"from": "source", "to": "worker1", "message_loss": "20%"}],
    }
    experiment = expand_experiment(network=network)
    assert {link.frame for link in experiment.links.values()} == {127}
    assert "must be at least 16" in error_of(network={"frame": "10B"})


def test_explicit_topology_has_named_links_and_reverse_links_with_defaults():
    network = {
        "topology": "explicit",
        "link": {"rate": "9mbit"},
        "links": [{"from": "source", "to": "worker1", "rate": "1mbit"}],
    }
    assert expand_experiment(network=network).links == {
        ("source", "worker1"): Link(rate=1e6),
        ("worker1", "source"): Link(rate=9e6),
    }


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            {"links": [{"between": ["source", "worker9"], "rate": "1mbit"}]},
            "network.links.0.between.1: unknown device 'worker9': did you mean 'worker3'?",
        ),
        (
            {"links": [{"from": "worker", "to": "source"}]},
            "network.links.0.from: 'worker' is a group of devices, worker1 to worker3: name one of them",
        ),
        (
            {"links": [{"from": "source", "to": "source"}]},
            "network.links.0: links 'source' to itself",
        ),
        (
            {"link": {"preset": "5g"}},
            "network.link.preset: unknown preset '5g': choose one of ethernet-10, ",
        ),
        (
            {"topology": "star", "links": [{"between": ["worker1", "worker2"]}]},
            "network.links.0: a star has no link between 'worker1' and 'worker2': use the topology mesh, or explicit",
        ),
        (
            {"topology": "line", "links": [{"between": ["source", "worker2"]}]},
            "network.links.0: a line has no link between 'source' and 'worker2'",
        ),
    ],
)
def test_invalid_links_are_rejected(network, message):
    assert message in error_of(network=network)


def test_sweep_expands_to_all_combinations_and_repetitions():
    runs = expand(
        sweep={
            "network.link.rate": ["10mbit", "20mbit"],
            "workload.batch_size": [1, 2, 3],
        },
        repetitions=2,
    )
    assert len(runs) == 2 * 3 * 2
    assert runs[0].point == {"network.link.rate": "10mbit", "workload.batch_size": 1}
    assert [run.repetition for run in runs[:2]] == [0, 1]
    assert runs[-1].experiment.links["source", "worker1"].rate == 20e6
    assert runs[-1].scenario.workload.batch_size == 3
    for run in runs:
        assert run.scenario.sweep == {}
        assert run.scenario.repetitions == 1


def test_repetitions_have_different_seeds_that_points_share():
    runs = expand(sweep={"workload.batch_size": [1, 2, 3]}, repetitions=2)
    seeds = {(run.repetition, run.scenario.seed) for run in runs}
    assert len(seeds) == 2
    # The first repetition has the seed of the scenario.
    assert (0, 7) in seeds


def test_keys_swept_together_are_one_axis():
    together = {
        "workload.batch_size": [1, 2, 3],
        "network.link.rate": ["1mbit", "2mbit", "3mbit"],
    }
    points = [run.point for run in expand(sweep={"seed": [5, 6], "together": together})]
    assert len(points) == 2 * 3
    assert points[1] == {
        "seed": 5,
        "workload.batch_size": 2,
        "network.link.rate": "2mbit",
    }
    rates = set()
    for point in points:
        if point["workload.batch_size"] == 3:
            rates.add(point["network.link.rate"])
    assert rates == {"3mbit"}


def test_labels_of_swept_values_and_points_set_no_key():
    # Labels are for reports only.
    swept = {"label": "slow", "value": "1mbit"}
    runs = expand(
        sweep={"network.link.rate": [swept]}, points=[{"label": "seventh", "seed": 7}]
    )
    assert runs[0].experiment.links["source", "worker1"].rate == 1e6
    assert runs[0].point == {"network.link.rate": swept}
    assert runs[1].point == {"label": "seventh", "seed": 7}


def test_point_with_label_only_is_rejected():
    assert "sets no key" in error_of(points=[{"label": "empty"}])


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (3, "sweep: must map dotted keys to lists of values"),
        ({"seed": 3}, "sweep: 'seed' must have a list of values: write seed: [ ... ]"),
        ([{"seed": 3}], "sweep: 'seed' must have a list of values"),
        ({"together": {"seed": 3}}, "sweep: 'seed' must have a list of values"),
        ({"together": {}}, "under 'together', not {}"),
    ],
)
def test_malformed_sweep_is_rejected_in_one_line(sweep, message):
    error = error_of(sweep=sweep)
    assert message in error
    assert "\n" not in error


def test_swept_scenario_differs_only_in_swept_keys():
    plain = expand()[0].scenario.model_dump()
    (swept,) = expand(sweep={"workload.batch_size": [9]})
    plain["workload"]["batch_size"] = 9
    assert swept.scenario.model_dump() == plain


def test_points_share_line_numbers_of_file():
    # A copy for each of thousands of points would take much memory.
    lines = {("workload",): 5, ("workload", "batch_size"): 6, ("sweep",): 7}
    scenario = validate(
        {**BASE, "sweep": {"workload.batch_size": [8, 9]}}, Source("a.yaml", lines)
    )
    for trial in trials(scenario):
        source = trial.scenario.source
        assert source.lines is lines
        # The swept value is in the line of the sweep.
        batch_size = source.where(("workload", "batch_size"))
        assert batch_size.startswith("a.yaml:7 (sweep: ")
        assert source.where(("workload", "steps")) == "a.yaml:5"


def test_key_within_overridden_value_has_position_of_override():
    source = Source("a.yaml", {("a",): 1, ("a", "b"): 2}).override({("a",): "set"})
    assert source.where(("a", "b")) == "set"


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            {"network.link.rate": ["10mbit", "20Mbps"]},
            "network.link.rate: 'Mbps' is not a unit of rate",
        ),
        (
            {"network.link.rte": ["10mbit"]},
            "network.link.rte: unknown key 'rte': did you mean 'rate'?",
        ),
        ({"seed": []}, "sweep.seed: has no values"),
        ({"name.x": [1]}, "name.x: unknown key"),
        (
            {
                "seed": [1],
                "together": {"workload.batch_size": [1, 2], "time_limit": ["9s"]},
            },
            "together.time_limit: needs as",
        ),
        (
            {"seed": [1], "together": {"seed": [1]}},
            "sweep.together.seed: is swept twice",
        ),
    ],
)
def test_invalid_sweeps_are_rejected(sweep, message):
    assert message in error_of(sweep=sweep)
