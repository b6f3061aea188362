"""Runs on real containers, from inside: what changes meanwhile, what breaks before the start, what a load does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.common.errors import TestbedError
from testbed.ml.data import load as load_data
from testbed.ml.preparation import shares_of
from testbed.network.broadcast import is_received
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load as load_scenario
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.outcome import Outcome
from testbed_controller.lab.engine import connect
from testbed_controller.lab.lab import Lab
from testbed_controller.lab.removal import DEVICE, RUN
from testbed_controller.running.emulation import emulate
from tests.helpers import owners, rings
from tests.helpers.commands import run_command
from tests.helpers.message_counts import count_differences
from tools.bench.pacing import load_one_core

pytestmark = [pytest.mark.containers, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("own")))
        yield


def scenario(name: str, steps: int = 40, **changes: Any) -> Prepared:
    """Return a small training scenario: a stage each on three devices, steps of some 150 ms."""
    tree: dict[str, Any] = {
        "name": name,
        "seed": 3,
        "devices": {
            "source": {"speed": "600mflops"},
            "worker": {"speed": "300mflops", "count": 2},
        },
        "network": {"link": {"rate": "100mbit", "delay": "5ms"}},
        "workload": {
            "model": {"name": "cnn"},
            "method": {
                "name": "pipeline",
                "micro_batches": 2,
                "stall_timeout": "1s",
                "rejoin_timeout": "2s",
            },
            "batch_size": 32,
            "steps": steps,
        },
        "time_limit": "90s",
    }
    return prepare(trials(Scenario.model_validate(tree | changes))[0])


def run(
    prepared: Prepared,
    on_stage: Callable[[str], None] = lambda _text: None,
    lab: Lab | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Run on a lab of its own, or on one that stands."""
    data = load_data(prepared.trial.scenario.workload.data)
    outcome = emulate(
        prepared, data, on_stage=on_stage, accept_links=True, standing=lab
    )
    return outcome, metrics(
        outcome, prepared.experiment, prepared.plan, prepared.method.declared
    )


def events(outcome: Outcome, kind: str) -> list[dict[str, Any]]:
    return [
        {"time": event.time, "device": event.device, **event.fields}
        for event in outcome.events
        if event.event == kind
    ]


def killing(device: str, when: str, scenario_name: str) -> Callable[[str], None]:
    """Return what kills a device's container as a run comes to a stage."""

    def on_stage(text: str) -> None:
        if text == when:
            filters = {
                "label": [RUN, f"{DEVICE}={device}"],
                "name": f"testbed-{scenario_name}-",
            }
            for container in connect().containers.list(filters=filters):
                container.kill()

    return on_stage


@pytest.mark.timed
def test_throttles_flaps_and_traces_take_effect_on_time() -> None:
    prepared = scenario(
        "emu-change",
        steps=20,
        faults=[
            {"throttle": {"device": "source", "slowdown": 4}, "at": "1s", "for": "1s"},
            {
                "flap": {
                    "between": ["worker1", "worker2"],
                    "down": "100ms",
                    "up": "400ms",
                    "times": 2,
                },
                "at": "2s",
            },
        ],
        trace=[
            "0,link source<->worker1 delay,8ms",
            "0.5,link source->worker1 delay,10ms",
            "0.8,device worker2 slowdown,2",
        ],
    )
    outcome, figures = run(prepared)
    assert outcome.status == "finished", outcome.error
    assert figures["steps"] == 20
    begun = [
        each["time"] for each in events(outcome, "state") if each["state"] == "started"
    ]
    assert len(begun) == 3
    assert max(begun) < 0.1, "each has heard of the start by the origin"
    for change in events(outcome, "trace"):
        assert 0 <= change["time"] - change["intended"] < 0.3, change
    assert [change["what"].split()[0] for change in events(outcome, "trace")] == [
        "link",
        "link",
        "device",
    ]
    factors = [(each["target"], each["factor"]) for each in events(outcome, "speed")]
    assert factors == [("worker2", 0.5), ("source", 0.25), ("source", 1.0)]
    checks = {check["name"]: check["detail"] for check in figures["verdict"]["checks"]}
    assert "3 changes by the trace" in checks["trace"]
    assert "4 changes by the flaps" in checks["flaps"]
    strikes = [each for each in events(outcome, "fault") if each["action"] == "flap"]
    assert [each["phase"] for each in strikes] == ["strike", "undo"] * 2
    throttled = [
        each["time"]
        for each in events(outcome, "fault")
        if each["action"] == "throttle"
    ]
    slow, fast = [], []
    for work in events(outcome, "compute"):
        if work["device"] == "source" and work["span"] == "forward":
            (
                slow
                if throttled[0] < work["start"] and work["time"] < throttled[1]
                else fast
            ).append(work["duration"])
    assert slow
    assert min(slow) == pytest.approx(4 * sorted(fast)[len(fast) // 2], rel=0.1)


@pytest.mark.timed
def test_what_a_paused_device_computes_stands_still_too() -> None:
    prepared = scenario(
        "emu-pause",
        devices={"source": {"speed": "200mflops"}},
        workload={
            "model": {"name": "cnn"},
            "method": {"name": "single"},
            "batch_size": 32,
            "steps": 6,
        },
        faults=[
            {
                "pause": "source",
                "when": {"device": "source", "begins": "forward", "batch": 3},
                "for": "1s",
            }
        ],
    )
    outcome, _ = run(prepared)
    assert outcome.status == "finished", outcome.error
    struck, undone = (each["time"] for each in events(outcome, "fault"))
    works = [each for each in events(outcome, "compute") if each["span"] == "forward"]
    paused = [each for each in works if each["start"] < struck < each["time"]]
    assert paused
    usual = sorted(each["duration"] for each in works)[len(works) // 2]
    assert usual > 0.1
    assert paused[0]["duration"] == pytest.approx(
        usual + undone - struck, abs=0.3 * usual
    )


def test_a_device_down_before_the_start_is_the_methods_business() -> None:
    prepared = scenario("emu-absent", steps=10)
    outcome, figures = run(
        prepared, killing("worker2", "deploying the programs", "emu-absent")
    )
    assert outcome.status == "finished", outcome.error
    assert figures["steps"] == 10
    assert "worker2 is down as the run starts" in [
        each["text"] for each in events(outcome, "log")
    ]


def test_each_device_is_sent_its_own_samples_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "owners.py").write_bytes(Path(owners.__file__).read_bytes())
    tree = {
        "name": "emu-owners",
        "devices": {
            "server": {"profile": "laptop"},
            "board": {"profile": "laptop", "count": 2},
        },
        "network": {"link": {"rate": "100mbit", "delay": "5ms"}},
        "workload": {
            "model": {"name": "mlp"},
            "data": {
                "name": "digits",
                "train": 100,
                "test": 20,
                "split": {"shards": 4},
            },
            "method": {"file": "owners.py", "name": "owners"},
            "steps": 1,
        },
    }
    (tmp_path / "owners.yaml").write_text(json.dumps(tree))
    prepared = prepare(trials(load_scenario(tmp_path / "owners.yaml"))[0])
    dataset = load_data(prepared.scenario.workload.data)
    outcome, _ = run(prepared)
    assert outcome.status == "finished", outcome.error
    given = {each["device"]: each for each in events(outcome, "owned_data")}
    assert (given["server"]["labels"], given["server"]["tests"]) == ([], 20)
    for name, share in shares_of(prepared).items():
        assert given[name]["labels"] == dataset.train_labels[share].tolist()
        assert given[name]["pixels"] == pytest.approx(
            dataset.train_images[share].sum(dtype=float)
        )
        assert given[name]["tests"] == 0
    # The virtual clock hands out the same.
    simulated = {
        event.device: event.fields
        for event in simulate(prepared, dataset).events
        if event.event == "owned_data"
    }
    fields = ("labels", "pixels", "tests", "samples")
    assert {
        name: {key: each[key] for key in fields} for name, each in given.items()
    } == simulated


def test_both_clocks_learn_the_same_though_a_device_dies() -> None:
    """PipeLearn: the round in which one of three dies, and all after it, are those of the other two."""
    prepared = scenario(
        "emu-learnt",
        devices={
            "server": {"speed": "100mflops", "processors": 2},
            "board": {"speed": "500kflops", "count": 3},
        },
        workload={
            "model": {"name": "mlp", "hidden": [32, 16]},
            "data": {"name": "digits", "train": 300, "test": 40, "split": "iid"},
            "method": {
                "name": "pipelearn",
                "split_point": 1,
                "parallel_batches": 2,
                "local_steps": 2,
                "round_deadline": "5s",
            },
            "training": {"optimizer": {"learning_rate": 0.05, "momentum": 0.9}},
            "steps": 6,
        },
        # Almost two seconds before it would have done its part.
        faults=[
            {
                "kill": "board2",
                "when": {"device": "board2", "begins": "forward", "batch": 2},
            }
        ],
    )
    outcome, _ = run(prepared)
    assert outcome.status == "finished", outcome.error
    simulated = simulate(prepared, load_data(prepared.scenario.workload.data))
    took_part = [list(each["samples"]) for each in events(outcome, "round")]
    assert took_part == [["board1", "board2", "board3"], *[["board1", "board3"]] * 2]
    assert took_part == [list(each["samples"]) for each in events(simulated, "round")]
    # What board2 has sent and received by its death depends on the instant of that.
    assert count_differences(outcome, simulated, excluded=["board2"]) == []
    assert outcome.weights is not None
    assert simulated.weights is not None
    for name, tensor in simulated.weights.items():
        assert tensor.equal(outcome.weights[name]), name


def test_without_its_lead_there_is_no_run() -> None:
    with pytest.raises(
        TestbedError, match="source coordinates the run and went down before the start"
    ):
        run(
            scenario("emu-lead", workload=rings.ring_workload()),
            killing("source", "deploying the programs", "emu-lead"),
        )


def test_a_lead_that_stays_dead_ends_the_run_at_once() -> None:
    faults = [{"kill": "source", "at": "1s"}]
    outcome, _ = run(
        scenario(
            "emu-leadless",
            workload=rings.ring_workload(),
            faults=faults,
            time_limit="60s",
        )
    )
    assert outcome.status == "failed"
    assert (
        outcome.error
        == "source is down; it is the coordinator of the run: end its fault by 'for', or restart it"
    )
    assert outcome.events[-1].time < 30


def test_casts_are_lost_whole_as_often_as_asked_also_after_a_change() -> None:
    base = {
        "network": {
            "topology": "mesh",
            "link": {"rate": "10mbit", "delay": "2ms", "message_loss": "30%"},
        },
        "workload": {
            "task": "infer",
            "model": {"name": "mlp"},
            "method": {
                "name": "exchange",
                "cast": True,
                "payload": "8kB",
            },  # six datagrams each
            "requests": 900,
        },
        "faults": [
            {
                "degrade": {"from": "source", "to": "worker2", "message_loss": "100%"},
                "at": "1s",
            }
        ],
    }
    prepared = scenario("emu-cast", **base)
    outcome, _ = run(prepared)
    assert outcome.status == "finished", outcome.error
    [fault] = events(outcome, "fault")
    casts = {each["number"]: each["time"] for each in events(outcome, "cast")}
    assert len(casts) == 900
    # The run ends soon after its last cast: a receiver that the host keeps waiting may not have heard the latest.
    counted = {
        number for number, when in casts.items() if when < max(casts.values()) - 1.0
    }
    received: dict[str, set[int]] = {"worker1": set(), "worker2": set()}
    for each in events(outcome, "receive"):
        received[each["device"]] |= {each["cast"]} & counted
    # Each receiver by draws of its own, which whoever runs this scenario makes alike.
    drawn = {
        name: {
            number
            for number in counted
            if is_received(prepared.trial.scenario.seed, "source", name, number, 0.3)
        }
        for name in received
    }
    assert received["worker1"] == drawn["worker1"]
    # A receiver may take in after the change what was cast before it.
    before = {number for number in counted if casts[number] < fault["intended"] - 0.3}
    after = {number for number in counted if casts[number] > fault["time"]}
    assert received["worker2"] & before == drawn["worker2"] & before
    assert not received["worker2"] & after
    assert drawn["worker1"] != drawn["worker2"]
    assert 0.6 < len(drawn["worker1"]) / len(counted) < 0.8
    assert before
    assert after


@pytest.mark.timed
def test_a_loaded_host_gives_the_same_step_time_or_says_that_it_does_not() -> None:
    prepared = scenario("emu-load", steps=12)
    lab = Lab.create(prepared.trial)
    try:
        _, idle = run(prepared, lab=lab)
        assert idle["trusted"], idle["verdict"]["summary"]
        with load_one_core():
            _, busy = run(prepared, lab=lab)
    finally:
        lab.down()
    same = abs(busy["step_time"] / idle["step_time"] - 1) <= 0.03
    assert same or not busy["trusted"], (
        idle["step_time"],
        busy["step_time"],
        busy["verdict"],
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/self/ns/time").exists(),
    reason="no clock of its own here",
)
@pytest.mark.parametrize("offset", [1000, -1000])
def test_a_run_on_an_engine_with_another_clock_has_the_times_of_this_one(
    tmp_path: Path, offset: int
) -> None:
    """The clock of a virtual machine's engine differs so from that of the controller."""
    path = tmp_path / "clock.yaml"
    devices = {"a": {"speed": rings.SPEED}, "b": {"speed": rings.SPEED}}
    tree = {
        "name": "emu-clock",
        "time_limit": "60s",
        "devices": devices,
        "network": {"link": {"delay": "5ms"}},
    }
    path.write_text(json.dumps(tree | {"workload": rings.ring_workload(3)}))
    clock = [
        "unshare",
        "-T",
        "--monotonic",
        str(offset),
        "--boottime",
        str(offset),
        "-f",
        "--kill-child",
    ]
    testbed = [
        str(Path(sys.executable).with_name("testbed")),
        "run",
        str(path),
        "--accept-links",
    ]
    out = tmp_path / "out"
    done = subprocess.run(
        [*clock, *testbed, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    times = [
        json.loads(line)["time"]
        for line in (out / "events.jsonl").read_text().splitlines()
    ]
    assert 0 <= min(times) < max(times) < 60
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["host"]["clock"]["offset"] == pytest.approx(-offset, abs=0.5)


def test_a_backend_that_the_kernel_lacks_is_one_line_and_3(tmp_path: Path) -> None:
    """Of the two there is one that this kernel lacks, or none."""
    path = tmp_path / "short.yaml"
    path.write_text(
        f"name: emu-links\ndevices: {{a: {{}}, b: {{}}}}\nnetwork: {{link: {{delay: 1ms}}}}\n"
        f"workload: {json.dumps(rings.ring_workload(1))}\n"
    )
    for backend in ("netem", "userspace"):
        done = run_command(
            "run",
            path,
            "--links",
            backend,
            "--accept-links",
            "--out",
            tmp_path / backend,
        )
        if done.returncode == 3:
            assert "modules" in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1
        else:
            assert done.returncode == 0, done.stderr
            assert (
                f'"backend": "{backend}"'
                in (tmp_path / backend / "manifest.json").read_text()
            )
            assert backend in done.stdout
