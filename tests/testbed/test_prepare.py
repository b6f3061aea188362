"""What needs a look at several keys at once is refused before any container exists, with file and line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from testbed.common.errors import InputError
from testbed.ml.data import catalog
from testbed.ml.methods.pipeline import Pipeline
from testbed.ml.preparation import data_folder, load_data, pretraining_of
from testbed.prepare import count_batches, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load

GOOD = """\
name: small
devices:
  source: {profile: laptop}
  worker:
    profile: raspberry-pi-4b
    count: 3
    memory: 64MiB
network:
  link: {rate: 50mbit, delay: 5ms}
workload:
  task: train
  model: {name: mlp}
  data: {name: digits}
  method: {name: pipeline, micro_batches: 4}
  batch_size: 64
  epochs: 2
faults:
  - kill: worker1
    at: 3s
    for: 1s
expect:
  accuracy: ">= 0.9"
time_limit: 60s
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path("small.yaml")


def prepared(file: Path, text: str = GOOD):
    file.write_text(text)
    return prepare(trials(load(file))[0])


def refusal(file: Path, text: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        prepared(file, text)
    return str(caught.value).split("\n")


def test_prepares_method_problem_and_plan(file):
    ready = prepared(file)
    assert ready.method.name == "pipeline"
    assert ready.problem.model.name == "mlp"
    assert [device.name for device in ready.problem.devices] == [
        "source",
        "worker1",
        "worker2",
        "worker3",
    ]
    assert ready.plan.coordinator == "source"
    assert ready.plan.assignments[0].start == 0
    assert ready.plan.assignments[-1].stop == len(ready.problem.model.units)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
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
            GOOD[GOOD.index("model:") : GOOD.index("  epochs:")],
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
            "network.topology: worker1 and worker2 hold neighbouring stages",
        ),
        (
            "name: digits",
            "name: synthetic-3x2",
            13,
            "workload.data.name: 'synthetic-3x2' is not synthetic-CxHxW",
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
            "network.subnet: '127.0.0.0/16' belongs to others",
        ),
        (
            "link: {",
            "subnet: 8.8.8.0/24\n  link: {",
            9,
            "network.subnet: '8.8.8.0/24' belongs to others",
        ),
        (
            "link: {",
            "subnet: 0.0.0.0/24\n  link: {",
            9,
            "network.subnet: '0.0.0.0/24' belongs to others",
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
            "faults.0.when.begins: 'worker1' never begins 'backwards': it begins backward,",
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
def test_names_line_key_and_remedy(file, old, new, line, said):
    assert old in GOOD
    lines = refusal(file, GOOD.replace(old, new, 1))
    assert lines[0].startswith(f"small.yaml:{line}: {said}")


@pytest.mark.parametrize(
    ("error", "place"),
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
def test_an_error_is_located_by_its_key_and_not_by_its_words(
    file, monkeypatch, error, place
):
    def refuse(self, problem):
        raise error

    monkeypatch.setattr(Pipeline, "plan", refuse)
    assert refusal(file, GOOD) == [f"small.yaml:{place}: {error.text}"]


def test_a_task_that_the_method_cannot_do(file):
    text = GOOD.replace("task: train", "task: infer").replace(
        "epochs: 2", "requests: 3"
    )
    assert refusal(file, text)[0] == (
        "small.yaml:11: workload.task: the method 'pipeline' cannot infer: it can train"
    )


def test_tells_independent_problems_together(file):
    text = (
        GOOD.replace("pipeline", "pipe")
        .replace("name: mlp", "name: ml")
        .replace("worker1\n", "wrker1\n")
    )
    text = text.replace("accuracy", "acc")
    assert [line.split(": ")[1] for line in refusal(file, text)] == [
        "workload.model.name",
        "workload.method.name",
        "faults.0.kill",
        "expect.acc",
    ]


def test_a_swept_value_that_does_not_fit_names_the_sweep(file):
    text = GOOD + "sweep:\n  workload.method.micro_batches: [4, 0]\n"
    file.write_text(text)
    runs = trials(load(file))
    prepare(runs[0])
    with pytest.raises(
        InputError,
        match=r"small\.yaml:25 \(sweep: 0\): workload\.method\.micro_batches: '0' must be",
    ):
        prepare(runs[1])


def test_precision_of_a_device_with_its_own_memory_is_located(file):
    old = "    memory: 64MiB\n"
    assert old in GOOD
    text = GOOD.replace(old, f"{old}    precision: int8\n    speed: 1gflops\n")
    (line,) = refusal(file, text)
    assert line.startswith("small.yaml:8: devices.worker.precision: ")


def test_last_batch_of_samples_in_files_is_checked_as_they_are_read(file):
    Path("net.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    first = [nn.Flatten(), nn.Linear(8, 6), nn.BatchNorm1d(6)]\n"
        "    return nn.Sequential(*first, nn.ReLU(), nn.Linear(6, classes))\n"
    )
    values = np.zeros((21, 8), np.float32)
    classes = np.arange(21) % 2
    np.savez("own.npz", x_train=values, y_train=classes, x_test=values, y_test=classes)
    text = (
        "name: own\ndevices: {a: {}}\n"
        "workload: {model: {file: net.py, name: net}, data: {name: own, path: own.npz}, method: {name: single}, "
        "epochs: 1, batch_size: BATCH, drop_last: false}\n"
    )
    assert load_data(prepared(file, text.replace("BATCH", "3"))).train_labels.size == 21
    with pytest.raises(InputError, match="last batch of 21 samples has 1, too few"):
        load_data(prepared(file, text.replace("BATCH", "4")))


def test_counts_batches_without_reading_the_data(file):
    from testbed.ml.data import load as load_data

    found = prepared(file)
    whole = 2 * (len(load_data(found.scenario.workload.data).train_labels) // 64)
    assert count_batches(found.scenario, found.plan) == whole
    assert (
        count_batches(found.scenario, found.plan.model_copy(update={"steps": 7})) == 7
    )
    assert (
        count_batches(found.scenario, found.plan.model_copy(update={"steps": 20_000}))
        == whole
    )


def test_data_lies_beside_the_scenario_or_where_fetch_puts_it(file):
    assert data_folder(prepared(file).trial.scenario) == Path("data/digits")
    Path("sub").mkdir()
    other = Path("sub/small.yaml")
    text = GOOD.replace("name: digits", "name: digits, folder: ../images")
    assert data_folder(prepared(other, text).trial.scenario) == Path("sub/../images")


def test_data_of_a_package_is_found_after_ones_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "SYSTEM_DATA_FOLDER", tmp_path / "system")
    assert catalog.data_place("mnist") == Path("data/mnist")
    (tmp_path / "system/mnist").mkdir(parents=True)
    assert catalog.data_place("mnist") == tmp_path / "system/mnist"
    Path("data/mnist").mkdir(parents=True)
    assert catalog.data_place("mnist") == Path("data/mnist")


def test_images_of_another_size_are_found_before_the_run(file):
    for part in ("train", "t10k"):
        Path(f"{part}-images-idx3-ubyte").write_bytes(
            bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 32, 0, 0, 0, 32, *[0] * 1024])
        )
    text = GOOD.replace("name: digits", "name: mnist, folder: .")
    assert refusal(file, text)[0] == (
        "small.yaml:13: workload.data.folder: train-images-idx3-ubyte: has images of 32x32 pixels, not of 28x28"
    )


def test_imports_no_torch(file):
    file.write_text(GOOD)
    code = (
        "import sys; from testbed.scenario.expand import trials; from testbed.scenario.loading import load; "
        "from testbed.prepare import prepare; prepare(trials(load('small.yaml'))[0]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


INFER = (
    GOOD[: GOOD.index("workload:")]
    + """\
workload:
  task: infer
  model: {name: yolov2}
  data: {name: image-64x64, path: one.png}
  method: {name: single}
  requests: 1
"""
)


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("", "", 13, "workload.data.path: one.png not found: give the path"),
        (
            ", path: one.png",
            "",
            13,
            "workload.data: image-64x64 is your own image: give its file with `path`",
        ),
        (
            "image-64x64",
            "photos-64x64",
            13,
            "workload.data.path: photos-64x64 is not read from a single file",
        ),
        (
            "image-64x64",
            "photos-64",
            13,
            "workload.data.name: 'photos-64' is not photos-HEIGHTxWIDTH",
        ),
        (
            "task: infer",
            "task: train",
            13,
            "workload.data.name: image-64x64 has no labels for training",
        ),
        (
            "{name: yolov2}\n  data: {name: image-64x64, path: one.png}",
            "{name: yolov2, weights: none.weights}\n  data: {name: photos-64x64}",
            12,
            "workload.model.weights: none.weights not found",
        ),
        (
            "{name: yolov2}\n  data: {name: image-64x64, path: one.png}",
            "{name: yolov2, weights: small.weights}\n  data: {name: photos-64x64}",
            12,
            "workload.model.weights: small.weights: is not a Darknet weights file",
        ),
    ],
)
def test_pictures_and_weights_are_looked_for_before_anything_runs(
    file, old, new, line, said
):
    Path("small.weights").write_text("not weights")
    text = INFER.replace(old, new)
    if "task: train" in text:
        text = text.replace("requests: 1", "steps: 1")
    assert any(
        message.startswith(f"small.yaml:{line}: {said}")
        for message in refusal(file, text)
    )


WEIGHTS = GOOD.replace("{name: mlp}", "{name: mlp, weights: first.yaml}")


def test_weights_of_a_scenario_are_prepared_with_what_begins_with_them(file):
    Path("first.yaml").write_text(GOOD.replace("name: small", "name: first"))
    first = pretraining_of(prepared(file, WEIGHTS))
    assert first is not None
    assert first.trial.scenario.name == "first"
    assert pretraining_of(prepared(file)) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "{name: mlp}",
            "{name: mlp, weights: small.yaml}",
            "takes its own initial weights from a scenario",
        ),
        ("{name: mlp}", "{name: mlp, hidden: [7, 7, 7]}", "trains another mlp"),
        ("{name: mlp}", "{name: cnn}", "trains cnn, not mlp"),
        ("time_limit", "repetitions: 2\ntime_limit", "has 2 runs"),
        ("epochs: 2", "epochs: zwei", "first.yaml:16: workload.epochs"),
    ],
)
def test_a_scenario_that_cannot_leave_the_weights_is_refused(file, old, new, said):
    Path("first.yaml").write_text(GOOD.replace(old, new))
    (message,) = refusal(file, WEIGHTS)
    assert message.startswith("small.yaml:12: workload.model.weights: ")
    assert said in message
