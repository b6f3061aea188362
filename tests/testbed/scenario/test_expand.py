from __future__ import annotations

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
    return trials(validate({**BASE, **parts}, Source("small.yaml")))


def refusal(**parts) -> str:
    with pytest.raises(InputError) as caught:
        expand(**parts)
    return str(caught.value)


def test_more_runs_than_anybody_waits_for_are_refused_at_once() -> None:
    for keys, key in (
        ({"repetitions": 10**9}, "repetitions"),
        (
            {
                "sweep": {
                    f"workload.method.{name}": list(range(100)) for name in "abcdefgh"
                }
            },
            "sweep",
        ),
        ({"points": [{"seed": 1}] * 101, "repetitions": 100}, "points"),
    ):
        with pytest.raises(
            InputError,
            match=rf"{key}: there would be .* runs, more than 10,000: use fewer",
        ):
            expand(**keys)


def test_counted_devices_are_numbered_from_one():
    (trial,) = expand(
        devices={"source": {}, "worker": {"count": 2}, "single": {"count": 1}}
    )
    assert [device.name for device in trial.experiment.devices] == [
        "source",
        "worker1",
        "worker2",
        "single1",
    ]


def test_profile_and_overrides_make_a_device():
    (trial,) = expand(
        devices={"a": {"profile": "raspberry-pi-3b", "memory": "512MiB", "cpus": 0.5}}
    )
    (device,) = trial.experiment.devices
    assert device.speed == PROFILES["raspberry-pi-3b"].speed
    assert device.memory == 512 * 2**20
    assert device.cpus == 0.5
    assert device.profile == "raspberry-pi-3b"


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (
            {"a": {"profile": "raspbery-pi-4b"}},
            "unknown profile 'raspbery-pi-4b': did you mean 'raspberry-pi-4b'?",
        ),
        (
            {"a1": {}, "a": {"count": 1}},
            "makes a second device called 'a1': rename one of the two",
        ),
        ({"a" * 30: {"count": 10}}, "is longer than 31 characters: shorten the name"),
    ],
)
def test_devices_that_cannot_be(devices, said):
    assert said in refusal(devices=devices)


def test_topologies():
    names = ["a", "b", "c"]
    both = {("a", "b"), ("b", "a")}
    assert set(directed_pairs("mesh", names)) == both | {
        ("a", "c"),
        ("c", "a"),
        ("b", "c"),
        ("c", "b"),
    }
    assert set(directed_pairs("star", names)) == both | {("a", "c"), ("c", "a")}
    assert set(directed_pairs("line", names)) == both | {("b", "c"), ("c", "b")}
    assert directed_pairs("explicit", names) == []
    for topology in ("mesh", "star", "line"):
        assert directed_pairs(topology, ["a"]) == []


def test_links_take_the_default_then_each_override_in_order():
    (trial,) = expand(
        network={
            "link": {"rate": "50mbit", "delay": "5ms", "loss": "1%"},
            "links": [
                {"between": ["worker1", "worker2"], "preset": "wifi", "delay": "7ms"},
                {"from": "worker1", "to": "worker2", "rate": "1mbit"},
            ],
        }
    )
    links = trial.experiment.links
    assert len(links) == 12
    assert links["source", "worker1"] == Link(50e6, 0.005, loss=0.01)
    assert links["worker2", "worker1"] == Link(50e6, 0.007, loss=0.01)
    assert links["worker1", "worker2"] == Link(1e6, 0.007, loss=0.01)


def test_presets_are_up_towards_the_first_device_and_down_from_it():
    (trial,) = expand(network={"link": {"preset": "4g", "delay": "20ms"}})
    assert trial.experiment.links["worker1", "source"] == Link(10e6, 0.02)
    assert trial.experiment.links["source", "worker1"] == Link(25e6, 0.02)
    assert trial.experiment.links["worker1", "worker2"] == Link(10e6, 0.02)


def test_a_device_has_the_access_of_a_preset():
    devices = {
        "a": {},
        "phone": {"access": "4g"},
        "other": {"access": "4g", "uplink": "5mbit"},
    }
    (trial,) = expand(devices=devices, network={"link": {"rate": "50mbit"}})
    assert [(each.uplink, each.downlink) for each in trial.experiment.devices] == [
        (None, None),
        (10e6, 25e6),
        (5e6, 25e6),
    ]
    rates = {pair: link.rate for pair, link in trial.experiment.bounded_links().items()}
    assert (rates["phone", "a"], rates["a", "phone"], rates["phone", "other"]) == (
        10e6,
        25e6,
        10e6,
    )
    said = refusal(devices={"a": {"access": "4h"}})
    assert "devices.a.access: unknown preset '4h': choose one of ethernet-10, " in said


def test_keys_beside_a_preset_win():
    (trial,) = expand(network={"link": {"preset": "lan", "rate": "3mbit"}})
    assert trial.experiment.links["source", "worker1"] == Link(
        3e6, PRESETS["lan"].delay
    )


def test_frames_are_those_of_every_link():
    network = {
        "frame": "127B",
        "links": [{"from": "source", "to": "worker1", "message_loss": "20%"}],
    }
    (trial,) = expand(network=network)
    assert {link.frame for link in trial.experiment.links.values()} == {127}
    assert "must be at least 16" in refusal(network={"frame": "10B"})


def test_explicit_links_only_and_the_way_back_with_the_default():
    (trial,) = expand(
        network={
            "topology": "explicit",
            "link": {"rate": "9mbit"},
            "links": [{"from": "source", "to": "worker1", "rate": "1mbit"}],
        }
    )
    assert trial.experiment.links == {
        ("source", "worker1"): Link(1e6),
        ("worker1", "source"): Link(9e6),
    }


@pytest.mark.parametrize(
    ("network", "said"),
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
def test_links_that_cannot_be(network, said):
    assert said in refusal(network=network)


def test_a_sweep_takes_all_combinations_and_repeats_each():
    runs = expand(
        sweep={
            "network.link.rate": ["10mbit", "20mbit"],
            "workload.batch_size": [1, 2, 3],
        },
        repetitions=2,
    )
    assert len(runs) == 12
    assert runs[0].point == {"network.link.rate": "10mbit", "workload.batch_size": 1}
    assert [run.repetition for run in runs[:2]] == [0, 1]
    assert runs[-1].experiment.links["source", "worker1"].rate == 20e6
    assert runs[-1].scenario.workload.batch_size == 3
    assert all(
        run.scenario.sweep == {} and run.scenario.repetitions == 1 for run in runs
    )
    seeds = {(run.repetition, run.scenario.seed) for run in runs}
    assert len(seeds) == 2
    assert (0, 7) in seeds


def test_keys_that_change_together_are_one_axis():
    together = {
        "workload.batch_size": [1, 2, 3],
        "network.link.rate": ["1mbit", "2mbit", "3mbit"],
    }
    points = [run.point for run in expand(sweep={"seed": [5, 6], "together": together})]
    assert len(points) == 6
    assert points[1] == {
        "seed": 5,
        "workload.batch_size": 2,
        "network.link.rate": "2mbit",
    }
    assert {
        point["network.link.rate"]
        for point in points
        if point["workload.batch_size"] == 3
    } == {"3mbit"}


def test_labels_of_swept_values_and_points_set_no_key():
    swept = {"label": "slow", "value": "1mbit"}
    runs = expand(
        sweep={"network.link.rate": [swept]}, points=[{"label": "seventh", "seed": 7}]
    )
    assert runs[0].experiment.links["source", "worker1"].rate == 1e6
    assert runs[0].point == {"network.link.rate": swept}
    assert runs[1].point == {"label": "seventh", "seed": 7}
    assert "sets no key" in refusal(points=[{"label": "empty"}])


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        (3, "sweep: takes dotted keys with lists of values"),
        ({"seed": 3}, "sweep: gives 'seed' no list of values: write seed: [ ... ]"),
        ([{"seed": 3}], "sweep: gives 'seed' no list of values"),
        ({"together": {"seed": 3}}, "sweep: gives 'seed' no list of values"),
        ({"together": {}}, "under 'together', not {}"),
    ],
)
def test_invalid_sweep_is_refused_in_one_line(sweep, said):
    message = refusal(sweep=sweep)
    assert said in message
    assert "\n" not in message


def test_a_swept_scenario_differs_in_the_swept_keys_only():
    plain = expand()[0].scenario.model_dump()
    (swept,) = expand(sweep={"workload.batch_size": [9]})
    plain["workload"]["batch_size"] = 9
    assert swept.scenario.model_dump() == plain


def test_the_lines_of_a_file_are_not_copied_for_each_point():
    lines = {("workload",): 5, ("workload", "batch_size"): 6, ("sweep",): 7}
    written = validate(
        {**BASE, "sweep": {"workload.batch_size": [8, 9]}}, Source("a.yaml", lines)
    )
    for trial in trials(written):
        assert trial.scenario.source.lines is lines
        assert trial.scenario.source.where(("workload", "batch_size")).startswith(
            "a.yaml:7 (sweep: "
        )
        assert trial.scenario.source.where(("workload", "steps")) == "a.yaml:5"


def test_key_below_an_override_has_its_position():
    source = Source("a.yaml", {("a",): 1, ("a", "b"): 2}).override({("a",): "set"})
    assert source.where(("a", "b")) == "set"


@pytest.mark.parametrize(
    ("sweep", "said"),
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
def test_sweeps_that_cannot_be(sweep, said):
    assert said in refusal(sweep=sweep)
