"""Runs in containers through the Python interface: faults, link traces, failures at the start and load on the host."""

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
def _isolate_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp("own")))
        yield


def prepare_scenario(name: str, steps: int = 40, **changes: Any) -> Prepared:
    """Prepare a small training scenario with one stage on each of three devices and steps of about 150 ms."""
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
    """Run a scenario on a new lab, or on ``lab``, and return its outcome and metrics."""
    data = load_data(prepared.trial.scenario.workload.data)
    outcome = emulate(
        prepared, data, on_stage=on_stage, accept_links=True, existing_lab=lab
    )
    declared = prepared.method.declared
    return outcome, metrics(outcome, prepared.experiment, prepared.plan, declared)


def run_to_end(prepared: Prepared) -> tuple[Outcome, dict[str, Any]]:
    outcome, values = run(prepared)
    assert outcome.status == "finished", outcome.error
    return outcome, values


def events_of(outcome: Outcome, name: str) -> list[dict[str, Any]]:
    return [
        {"time": event.time, "device": event.device, **event.fields}
        for event in outcome.events
        if event.event == name
    ]


def owned_data_of(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Return the reported data of each device."""
    owned = {}
    for event in events_of(outcome, "owned_data"):
        keys = ("labels", "pixels", "tests", "samples")
        owned[event["device"]] = {key: event[key] for key in keys}
    return owned


def median_of(values: list[float]) -> float:
    """Return the upper median."""
    return sorted(values)[len(values) // 2]


def kill_at_stage(device: str, stage: str, scenario_name: str) -> Callable[[str], None]:
    """Return a callback for killing a device's container as soon as a run reaches a stage."""

    def on_stage(text: str) -> None:
        if text == stage:
            filters = {
                "label": [RUN, f"{DEVICE}={device}"],
                "name": f"testbed-{scenario_name}-",
            }
            for container in connect().containers.list(filters=filters):
                container.kill()

    return on_stage


TIMED_FAULTS: list[dict[str, Any]] = [
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
]
LINK_TRACE = [
    "0,link source<->worker1 delay,8ms",
    "0.5,link source->worker1 delay,10ms",
    "0.8,device worker2 slowdown,2",
]


@pytest.mark.timed
def test_throttles_flaps_and_link_traces_take_effect_on_time() -> None:
    prepared = prepare_scenario(
        "emu-change", steps=20, faults=TIMED_FAULTS, trace=LINK_TRACE
    )
    outcome, values = run_to_end(prepared)
    assert values["steps"] == 20
    starts = [
        event["time"]
        for event in events_of(outcome, "state")
        if event["state"] == "started"
    ]
    assert len(starts) == 3
    assert max(starts) < 0.1, "a device received the start after the origin"
    changes = events_of(outcome, "trace")
    for change in changes:
        assert 0 <= change["time"] - change["intended"] < 0.3, change
    targets = [change["what"].split()[0] for change in changes]
    assert targets == ["link", "link", "device"]
    factors = [
        (event["target"], event["factor"]) for event in events_of(outcome, "speed")
    ]
    assert factors == [("worker2", 0.5), ("source", 0.25), ("source", 1.0)]
    checks = {check["name"]: check["detail"] for check in values["verdict"]["checks"]}
    assert "3 changes by the trace" in checks["trace"]
    assert "4 changes by the flaps" in checks["flaps"]
    faults = events_of(outcome, "fault")
    flap_phases = [fault["phase"] for fault in faults if fault["action"] == "flap"]
    assert flap_phases == ["strike", "undo"] * 2
    # The throttle is injected and reverted once.
    begin, end = [fault["time"] for fault in faults if fault["action"] == "throttle"]
    slow, fast = [], []
    for work in events_of(outcome, "compute"):
        if (work["device"], work["span"]) != ("source", "forward"):
            continue
        if begin < work["start"] and work["time"] < end:
            slow.append(work["duration"])
        else:
            fast.append(work["duration"])
    assert slow
    assert min(slow) == pytest.approx(4 * median_of(fast), rel=0.1)


@pytest.mark.timed
def test_computation_of_paused_device_is_paused() -> None:
    prepared = prepare_scenario(
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
    outcome, _ = run_to_end(prepared)
    begin, end = (fault["time"] for fault in events_of(outcome, "fault"))
    works = [
        work for work in events_of(outcome, "compute") if work["span"] == "forward"
    ]
    paused = [work for work in works if work["start"] < begin < work["time"]]
    assert paused
    usual = median_of([work["duration"] for work in works])
    assert usual > 0.1
    # The pause extends the computation by its own duration.
    expected = pytest.approx(usual + end - begin, abs=0.3 * usual)
    assert paused[0]["duration"] == expected


def test_device_down_before_start_is_passed_to_method() -> None:
    prepared = prepare_scenario("emu-absent", steps=10)
    kill = kill_at_stage("worker2", "deploying the programs", "emu-absent")
    outcome, values = run(prepared, kill)
    assert outcome.status == "finished", outcome.error
    assert values["steps"] == 10
    logs = [event["text"] for event in events_of(outcome, "log")]
    assert "worker2 is down as the run starts" in logs


def test_each_device_receives_only_its_own_samples(tmp_path: Path) -> None:
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
    outcome, _ = run_to_end(prepared)
    owned = owned_data_of(outcome)
    assert (owned["server"]["labels"], owned["server"]["tests"]) == ([], 20)
    for name, share in shares_of(prepared).items():
        assert owned[name]["labels"] == dataset.train_labels[share].tolist()
        pixels = dataset.train_images[share].sum(dtype=float)
        assert owned[name]["pixels"] == pytest.approx(pixels)
        assert owned[name]["tests"] == 0
    # The virtual clock distributes the samples equally.
    assert owned == owned_data_of(simulate(prepared, dataset))


def test_both_clocks_train_equal_weights_after_loss_of_device() -> None:
    prepared = prepare_scenario(
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
        # The kill precedes the device's update by almost two seconds, so no clock can let the update pass.
        faults=[
            {
                "kill": "board2",
                "when": {"device": "board2", "begins": "forward", "batch": 2},
            }
        ],
    )
    outcome, _ = run_to_end(prepared)
    simulated = simulate(prepared, load_data(prepared.scenario.workload.data))
    # The round of the kill and all later rounds continue with the other two devices.
    remaining = ["board1", "board3"]
    expected = [["board1", "board2", "board3"], remaining, remaining]
    for one_clock in (outcome, simulated):
        rounds = events_of(one_clock, "round")
        assert [list(event["samples"]) for event in rounds] == expected
    # The number of messages of board2 depends on the exact time of its kill.
    assert count_differences(outcome, simulated, excluded=["board2"]) == []
    assert outcome.weights is not None
    assert simulated.weights is not None
    for name, tensor in simulated.weights.items():
        assert tensor.equal(outcome.weights[name]), name


def test_run_without_coordinator_is_refused() -> None:
    prepared = prepare_scenario("emu-lead", workload=rings.ring_workload())
    kill = kill_at_stage("source", "deploying the programs", "emu-lead")
    message = "source coordinates the run and went down before the start"
    with pytest.raises(TestbedError, match=message):
        run(prepared, kill)


def test_permanent_loss_of_coordinator_fails_run() -> None:
    prepared = prepare_scenario(
        "emu-leadless",
        workload=rings.ring_workload(),
        faults=[{"kill": "source", "at": "1s"}],
        time_limit="60s",
    )
    outcome, _ = run(prepared)
    assert outcome.status == "failed"
    assert (
        outcome.error
        == "source is down; it is the coordinator of the run: end its fault by 'for', or restart it"
    )
    # Well before the time limit.
    assert outcome.events[-1].time < 30


def expected_casts(prepared: Prepared, receiver: str, numbers: set[int]) -> set[int]:
    """Return the casts of the source without the losses drawn for a receiver from the scenario's seed."""
    seed = prepared.trial.scenario.seed
    casts = set()
    for number in numbers:
        if is_received(seed, "source", receiver, number, 0.3):
            casts.add(number)
    return casts


def test_casts_are_lost_whole_at_requested_rate_also_after_change() -> None:
    changes = {
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
                # A cast takes six datagrams, and losing one would lose only a part.
                "payload": "8kB",
            },
            "requests": 900,
        },
        "faults": [
            {
                "degrade": {"from": "source", "to": "worker2", "message_loss": "100%"},
                "at": "1s",
            }
        ],
    }
    prepared = prepare_scenario("emu-cast", **changes)
    outcome, _ = run_to_end(prepared)
    [fault] = events_of(outcome, "fault")
    casts = {event["number"]: event["time"] for event in events_of(outcome, "cast")}
    assert len(casts) == 900
    # The run ends soon after its last cast. On a busy host a receiver may miss the latest casts, so they do not count.
    last_counted = max(casts.values()) - 1.0
    counted = {number for number, time in casts.items() if time < last_counted}
    received: dict[str, set[int]] = {"worker1": set(), "worker2": set()}
    for event in events_of(outcome, "receive"):
        if event["cast"] in counted:
            received[event["device"]].add(event["cast"])
    expected = {name: expected_casts(prepared, name, counted) for name in received}
    assert received["worker1"] == expected["worker1"]
    # A cast that precedes the change of the link may arrive after it.
    before = {number for number in counted if casts[number] < fault["intended"] - 0.3}
    after = {number for number in counted if casts[number] > fault["time"]}
    assert received["worker2"] & before == expected["worker2"] & before
    assert not received["worker2"] & after
    assert expected["worker1"] != expected["worker2"]
    # 30 % of casts are lost.
    assert 0.6 < len(expected["worker1"]) / len(counted) < 0.8
    assert before
    assert after


@pytest.mark.timed
def test_loaded_host_measures_equal_step_time_or_is_not_trusted() -> None:
    prepared = prepare_scenario("emu-load", steps=12)
    lab = Lab.create(prepared.trial)
    try:
        _, idle = run(prepared, lab=lab)
        assert idle["trusted"], idle["verdict"]["summary"]
        with load_one_core():
            _, busy = run(prepared, lab=lab)
    finally:
        lab.down()
    is_equal = abs(busy["step_time"] / idle["step_time"] - 1) <= 0.03
    times = idle["step_time"], busy["step_time"]
    assert is_equal or not busy["trusted"], (times, busy["verdict"])


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/self/ns/time").exists(),
    reason="needs root and time namespaces",
)
@pytest.mark.parametrize("offset", [1000, -1000])
def test_event_times_are_converted_from_clock_of_engine(
    tmp_path: Path, offset: int
) -> None:
    # An engine in a virtual machine has another clock than the controller, too. Here, the controller's is shifted.
    path = tmp_path / "clock.yaml"
    devices = {"a": {"speed": rings.SPEED}, "b": {"speed": rings.SPEED}}
    tree = {
        "name": "emu-clock",
        "time_limit": "60s",
        "devices": devices,
        "network": {"link": {"delay": "5ms"}},
    }
    path.write_text(json.dumps(tree | {"workload": rings.ring_workload(3)}))
    out = tmp_path / "out"
    command = ["unshare", "-T", "--monotonic", str(offset), "--boottime", str(offset)]
    command += ["-f", "--kill-child"]
    command += [str(Path(sys.executable).with_name("testbed")), "run", str(path)]
    command += ["--accept-links", "--out", str(out)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert completed.returncode == 0, completed.stderr
    lines = (out / "events.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines]
    assert 0 <= min(times) < max(times) < 60
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["host"]["clock"]["offset"] == pytest.approx(-offset, abs=0.5)


def test_backend_missing_in_kernel_exits_with_3_and_one_line(tmp_path: Path) -> None:
    # Most kernels lack one of the two backends, some lack none.
    path = tmp_path / "short.yaml"
    path.write_text(
        f"name: emu-links\ndevices: {{a: {{}}, b: {{}}}}\nnetwork: {{link: {{delay: 1ms}}}}\n"
        f"workload: {json.dumps(rings.ring_workload(1))}\n"
    )
    for backend in ("netem", "userspace"):
        out = tmp_path / backend
        completed = run_command(
            "run", path, "--links", backend, "--accept-links", "--out", out
        )
        if completed.returncode == 3:
            assert "modules" in completed.stderr
            assert len(completed.stderr.strip().splitlines()) == 1
        else:
            assert completed.returncode == 0, completed.stderr
            assert f'"backend": "{backend}"' in (out / "manifest.json").read_text()
            assert backend in completed.stdout
