"""Preparation of a run: the plan, and validation across several keys with file, line and remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.ml.methods.pipeline import Pipeline
from testbed.prepare import count_batches, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from tests.testbed.preparation_scenario import VALID, error_lines, prepare_text


@pytest.fixture
def file(tmp_path, monkeypatch):
    # Error messages then begin with the name of the file, without its folder.
    monkeypatch.chdir(tmp_path)
    return Path("small.yaml")


def test_scenario_is_prepared_with_method_problem_and_plan(file):
    prepared = prepare_text(file)
    assert prepared.method.name == "pipeline"
    assert prepared.problem.model.name == "mlp"
    names = [device.name for device in prepared.problem.devices]
    assert names == ["source", "worker1", "worker2", "worker3"]
    assert prepared.plan.coordinator == "source"
    # The stages cover the whole model.
    assert prepared.plan.assignments[0].start == 0
    assert prepared.plan.assignments[-1].stop == len(prepared.problem.model.units)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "name: pipeline",
            "name: pipline",
            14,
            "workload.method.name: unknown method 'pipline': did you mean 'pipe",
        ),
        (
            "micro_batches",
            "microbatches",
            14,
            "workload.method.microbatches: unknown key 'microbatches': did you mean",
        ),
        (
            "micro_batches: 4",
            "micro_batches: 0",
            14,
            "workload.method.micro_batches: '0' must be at least 1",
        ),
        (
            "model: {name: mlp}",
            "model: {name: mpl}",
            12,
            "workload.model.name: unknown model 'mpl': did you mean 'mlp'",
        ),
        (
            "name: mlp",
            "name: mlp, hiden: [3]",
            12,
            "workload.model.hiden: unknown key 'hiden': did you mean 'hidden'?",
        ),
        (
            "name: mlp",
            "name: mlp, hidden: [a]",
            12,
            "workload.model.hidden.0: 'a' must be a whole number",
        ),
        (
            "name: digits",
            "name: digit",
            13,
            "workload.data.name: unknown data set 'digit': did you mean 'digits'?",
        ),
        (
            "batch_size: 64",
            "batch_size: 1439",
            15,
            "workload.batch_size: a batch of 1439 is more than the 1438",
        ),
        (
            "name: digits",
            "name: synthetic-1x8x8, train: 63",
            15,
            "workload.batch_size: a batch of 64 is more than",
        ),
        (
            VALID[VALID.index("model:") : VALID.index("  epochs:")],
            "model: {name: mobilenetv2, width: 0.1}\n  data: {name: digits}\n"
            "  method: {name: pipeline, micro_batches: 4}\n  batch_size: 7\n",
            15,
            "workload.batch_size: block6-1 normalises over samples alone, and a batch of 1 has no variance",
        ),
        (
            "count: 3",
            "count: true",
            6,
            "devices.worker.count: 'true' must be a whole number",
        ),
        (
            "micro_batches: 4",
            "micro_batches: true",
            14,
            "workload.method.micro_batches: 'true' must be a whole number",
        ),
        (
            "epochs: 2",
            "epochs: 2\n  training: {optimizer: {momentum: true}}",
            17,
            "workload.training.optimizer.momentum: 'true' must be a number",
        ),
        (
            "name: digits",
            "name: mnist",
            13,
            "workload.data.folder: mnist is read from files, but the folder",
        ),
        (
            "name: digits",
            "name: digits, train: 2000",
            13,
            "workload.data.train: digits has 1438 training samples, not 2",
        ),
        (
            "name: digits",
            "name: mnist, folder: .",
            13,
            "workload.data.folder: . contains no file of mnist",
        ),
        (
            "link: {",
            "topology: star\n  link: {",
            9,
            "network.topology: worker1 and worker2 have neighbouring stages",
        ),
        (
            "name: digits",
            "name: synthetic-3x2",
            13,
            "workload.data.name: 'synthetic-3x2' must be synthetic-CxHxW",
        ),
        (
            "model: {name: mlp}",
            "model: {name: mlp, hidden: [9]}",
            14,
            "workload.method",
        ),
        (
            "model: {name: mlp}",
            f"model: {{name: mlp, hidden: {[8] * 1001}}}",
            12,
            "workload.model.hidden: is too long: at most 1000 are possible",
        ),
        (
            "  source:",
            "  shaper: {}\n  source:",
            3,
            "devices.shaper: this name is reserved",
        ),
        (
            "link: {",
            "subnet: 10.0.0.0/30\n  link: {",
            9,
            "network.subnet: '10.0.0.0/30' has no room for 4 devices",
        ),
        (
            "link: {",
            "subnet: 127.0.0.0/16\n  link: {",
            9,
            "network.subnet: '127.0.0.0/16' is not a private range",
        ),
        (
            "link: {",
            "subnet: 8.8.8.0/24\n  link: {",
            9,
            "network.subnet: '8.8.8.0/24' is not a private range",
        ),
        (
            "link: {",
            "subnet: 0.0.0.0/24\n  link: {",
            9,
            "network.subnet: '0.0.0.0/24' is not a private range",
        ),
        (
            "link: {",
            "subnet: 198.18.0.1/15\n  link: {",
            9,
            "network.subnet: '198.18.0.1/15' is not a range",
        ),
        ("64MiB", "1kB", 7, "devices.worker.memory: "),
        (
            "kill: worker1",
            "kill: worker9",
            18,
            "faults.0.kill: unknown device 'worker9': did you mean 'worker3'?",
        ),
        (
            "kill: worker1",
            "kill: worker",
            18,
            "faults.0.kill: 'worker' is a group of devices, worker1 to worker3",
        ),
        (
            "at: 3s",
            "when: {device: worker1, begins: backwards}",
            19,
            "faults.0.when.begins: 'worker1' has no computation 'backwards': it begins backward,",
        ),
        (
            "at: 3s",
            "when: {device: worker1, begins: backward, batch: 44}",
            19,
            "faults.0.when.batch: out of range: batches are counted from 0 to 43",
        ),
        (
            "at: 3s",
            "when: {device: worker1, event: recover}",
            19,
            "faults.0.when.event: no device records an event 'recover'",
        ),
        (
            "at: 3s",
            "when: {device: boss, begins: backward}",
            19,
            "faults.0.when.device: unknown device 'boss'",
        ),
        (
            "at: 3s",
            "at: 90s",
            19,
            "faults.0.at: the run is over at its time_limit of 60s",
        ),
        (
            "at: 3s",
            "after: 3s",
            19,
            "faults.0.after: the first fault has no predecessor",
        ),
        (
            "kill: worker1",
            "partition: [[source, wroker1]]",
            18,
            "faults.0.partition.0.1: unknown device 'wroker1'",
        ),
        (
            "kill: worker1",
            "partition: [[source, worker1], [worker1]]",
            18,
            "faults.0.partition: 'worker1' is named twice",
        ),
        (
            "kill: worker1",
            "degrade: {device: source}",
            18,
            "faults.0.degrade: has no effect",
        ),
        (
            "kill: worker1\n    at: 3s\n    for: 1s",
            "resume: worker1\n    at: 3s",
            18,
            "faults.0.resume: no fault of this",
        ),
        (
            "accuracy:",
            "acuracy:",
            22,
            "expect.acuracy: unknown metric 'acuracy': did you mean 'accuracy'?",
        ),
        (
            'accuracy: ">= 0.9"',
            'duration: "< 60"',
            22,
            "expect.duration: '60' has no unit",
        ),
        (
            'accuracy: ">= 0.9"',
            'accuracy: "high"',
            22,
            "expect.accuracy: 'high' is not a condition",
        ),
        (
            'accuracy: ">= 0.9"',
            'devices.worker.idle: "< 1s"',
            22,
            "expect.devices.worker.idle: 'worker' is a group of devices",
        ),
        (
            "accuracy:",
            "devices.source.idl:",
            22,
            "expect.devices.source.idl: unknown metric of a device 'idl': did",
        ),
    ],
)
def test_invalid_scenario_is_refused_with_line_and_key(file, old, new, line, message):
    assert old in VALID
    lines = error_lines(file, VALID.replace(old, new, 1))
    assert lines[0].startswith(f"small.yaml:{line}: {message}")


@pytest.mark.parametrize(
    ("error", "position"),
    [
        (
            InputError("a ring over this link budget is too long", ("method", "name")),
            "14: workload.method.name",
        ),
        (InputError("a link is worth more than that"), "14: workload.method"),
        (InputError("model trees are no networks", ("model",)), "12: workload.model"),
        (
            InputError("source and others are too many", ("batch_size",)),
            "15: workload.batch_size",
        ),
        (
            InputError("is too small", ("devices", "worker2", "memory")),
            "7: devices.worker.memory",
        ),
        (
            InputError("is too small", ("devices", "source", "memory")),
            "3: devices.source",
        ),
        (
            InputError("computes in float32", ("devices", "worker2", "precision")),
            "4: devices.worker",
        ),
        (InputError("lacks a link", ("network", "topology")), "8: network.topology"),
    ],
)
def test_planning_error_is_located_by_key(file, monkeypatch, error, position):
    # The texts contain words of other keys, which must not matter.
    def raise_error(self, problem):
        raise error

    monkeypatch.setattr(Pipeline, "plan", raise_error)
    assert error_lines(file, VALID) == [f"small.yaml:{position}: {error.text}"]


def test_task_unsupported_by_method_is_refused(file):
    text = VALID.replace("task: train", "task: infer")
    text = text.replace("epochs: 2", "requests: 3")
    assert error_lines(file, text)[0] == (
        "small.yaml:11: workload.task: the method 'pipeline' does not support the task 'infer'; supported: train"
    )


def test_independent_errors_are_reported_together(file):
    text = VALID.replace("pipeline", "pipe")
    text = text.replace("name: mlp", "name: ml")
    text = text.replace("worker1\n", "wrker1\n")
    text = text.replace("accuracy", "acc")
    keys = [line.split(": ")[1] for line in error_lines(file, text)]
    assert keys == [
        "workload.model.name",
        "workload.method.name",
        "faults.0.kill",
        "expect.acc",
    ]


def test_invalid_value_of_sweep_is_located_in_sweep(file):
    file.write_text(VALID + "sweep:\n  workload.method.micro_batches: [4, 0]\n")
    valid_trial, invalid_trial = trials(load(file))
    prepare(valid_trial)
    with pytest.raises(
        InputError,
        match=r"small\.yaml:25 \(sweep: 0\): workload\.method\.micro_batches: '0' must be",
    ):
        prepare(invalid_trial)


def test_precision_error_is_located_at_precision_of_device(file):
    old = "    memory: 64MiB\n"
    assert old in VALID
    text = VALID.replace(old, f"{old}    precision: int8\n    speed: 1gflops\n")
    (line,) = error_lines(file, text)
    assert line.startswith("small.yaml:8: devices.worker.precision: ")


@pytest.mark.parametrize(
    ("planned_steps", "expected"),
    # 1,438 training samples are 22 batches of 64, in two epochs.
    [(None, 44), (7, 7), (20_000, 44)],
)
def test_batches_are_limited_by_epochs_and_planned_steps(file, planned_steps, expected):
    prepared = prepare_text(file)
    plan = prepared.plan
    if planned_steps is not None:
        plan = plan.model_copy(update={"steps": planned_steps})
    assert count_batches(prepared.scenario, plan) == expected


def test_preparation_imports_no_torch(file):
    file.write_text(VALID)
    # This process has imported torch already.
    code = (
        "import sys; from testbed.scenario.expand import trials; from testbed.scenario.loading import load; "
        "from testbed.prepare import prepare; prepare(trials(load('small.yaml'))[0]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
