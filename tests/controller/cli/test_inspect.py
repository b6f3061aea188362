"""Commands that inspect scenarios, catalogues and data, and errors of the command line."""

from __future__ import annotations

import errno
import json
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner

from testbed.common.errors import InputError
from testbed.hardware import PROFILES
from testbed.methods import METHODS
from testbed.ml.models import CATALOG
from testbed.network.parts import PRESETS
from testbed_controller.cli.main import COMMANDS, RENAMED, main
from testbed_controller.cli.main import testbed as command_line
from testbed_controller.cli.options import first_sentence


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(command_line, arguments)
        assert result.exit_code == status, result.output
        return result.output

    return call


def call_json(call, *arguments: str, status: int = 0):
    return json.loads(call(*arguments, "--json", status=status))


def test_plan_shows_coordinator_prediction_and_schedule(call):
    output = call("plan", "quickstart")
    # The coordinator is marked.
    assert "source *" in output
    assert "predicted step time" in output
    assert "stage 0  F0 F1 F2 F3" in output
    assert max(map(len, output.splitlines())) <= 80


def test_assignments_of_plan_cover_model(call):
    batch_size = 64
    overrides = ("--set", f"workload.batch_size={batch_size}")
    (plan,) = call_json(call, "plan", "quickstart", *overrides)
    rows = plan["assignments"]
    assert rows[0]["start"] == 0
    assert [row["start"] for row in rows[1:]] == [row["stop"] for row in rows[:-1]]
    model = call_json(call, "show", "models", "cnn")
    assert sum(row["parameters"] for row in rows) == model["parameters"]
    # A backward pass costs twice a forward pass.
    flops = 3 * batch_size * model["forward_flops"]
    assert sum(row["flops"] for row in rows) == pytest.approx(flops)
    assert plan["schedule"].startswith("stage 0")


def test_measured_model_has_speed(call):
    model = call_json(call, "show", "models", "mlp", "--measure", "8")
    assert model["speed"] > 0


def test_plan_of_sweep_plans_each_point_once(call):
    sweep = "sweep={workload.method.schedule: [gpipe, 1f1b]}"
    overrides = ("--set", sweep, "--set", "repetitions=3")
    plans = call_json(call, "plan", "quickstart", *overrides)
    schedules = [plan["point"]["workload.method.schedule"] for plan in plans]
    assert schedules == ["gpipe", "1f1b"]
    assert plans[0]["schedule"] != plans[1]["schedule"]


def test_plan_without_pipeline_has_no_schedule(call):
    output = call("plan", "smoke/single-mlp")
    assert "stage" not in output
    assert "alone *" in output


def test_validate_reports_summary_or_errors_of_each_file(call, tmp_path):
    output = call("validate", "quickstart", "smoke/pause")
    assert output.splitlines() == [
        "ok scenarios/quickstart.yaml: 4 devices, 12 directed links, 1 fault, 1 run",
        "ok scenarios/smoke/pause.yaml: 3 devices, 6 directed links, 1 fault, 1 run",
    ]
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\ndevices: {a: {}}\n")
    assert f"{bad}:1: workload: is missing" in call("validate", str(bad), status=2)
    reports = call_json(call, "validate", "quickstart", str(bad), status=2)
    assert [report["ok"] for report in reports] == [True, False]
    assert reports[1]["errors"][0].startswith(f"{bad}:1: workload: is missing")


def validate_quickstart(call, *overrides: str, status: int = 0) -> str:
    arguments = ["validate", "quickstart"]
    for override in overrides:
        arguments += ["--set", override]
    return call(*arguments, status=status)


def test_validate_names_extra_of_missing_package(call, monkeypatch):
    # An import of it now fails.
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    metrics = "workload.training.metrics={recall: {}}"
    output = validate_quickstart(call, metrics, status=2)
    assert "pip install 'edge-testbed[metrics]'" in " ".join(output.split())


def test_validate_warns_of_loss_beyond_model_of_simulation(call):
    high_loss = "network.link.loss=20%"
    assert "not in the model" in validate_quickstart(call, high_loss)
    low_loss = "network.link={rate: 50mbit, delay: 10ms, loss: 1%}"
    assert "not in the model" not in validate_quickstart(call, low_loss)


def test_validate_checks_every_point_of_sweep(call):
    sweep = "sweep={workload.method.stages: [2, 9]}"
    output = validate_quickstart(call, sweep, status=2)
    assert "(sweep: 9): workload.method.stages: " in output


def test_more_devices_than_units_need_number_of_stages(call):
    workers = "devices.worker.count=8"
    # The model has six units.
    output = validate_quickstart(call, workers, status=2)
    assert "scenarios/quickstart.yaml" in output
    assert "write stages: 6, and the other devices stand by" in output
    assert output.count("\n") == 1
    validate_quickstart(call, workers, "workload.method.stages=6")


def test_show_methods_describes_one_method_by_name(call):
    output = call("show", "methods", "pipeline")
    assert output.strip().startswith("pipeline")
    assert "(one of even, optimal; default optimal)" in " ".join(output.split())
    assert "edgepipe" not in output
    message = "unknown method 'pipelin': did you mean 'pipeline'"
    with pytest.raises(InputError, match=message):
        command_line.main(["show", "methods", "pipelin"], standalone_mode=False)


def test_invalid_input_ends_with_status_2_and_one_line(monkeypatch, capsys):
    override = "network.link.rate=50Mbps"
    arguments = ["plan", "quickstart", "--set", override]
    monkeypatch.setattr("sys.argv", ["testbed", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    error = capsys.readouterr().err.strip()
    message = "network.link.rate: 'Mbps' is not a unit of rate"
    assert error.startswith(f"testbed: --set {override}: {message}")
    assert "\n" not in error


@pytest.mark.parametrize(
    "group", [(), ("link",), ("fault",), ("show",), ("setup",), ("export",)]
)
def test_help_lists_commands_without_shortened_sentences(call, group):
    output = call(*group, "--help")
    assert max(map(len, output.splitlines())) <= 80
    # click shortens long sentences by default.
    for line in output.partition("Commands:")[2].splitlines():
        assert not line.endswith("...")


def test_former_names_are_not_commands():
    assert not {*RENAMED} & {*COMMANDS}


@pytest.mark.parametrize(
    ("arguments", "replaced", "present"),
    [
        *(([name], name, present) for name, present in RENAMED.items()),
        (["link", "probe"], "probe", "testbed link measure"),
    ],
)
def test_former_names_of_commands_are_refused_with_present_names(
    arguments, replaced, present
):
    with pytest.raises(click.UsageError) as raised:
        command_line.main(arguments, standalone_mode=False)
    message = f"'{replaced}' has been replaced: use '{present}'"
    assert raised.value.message == message


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--runtime", "simulate"], "--runtime simulate"),
        (["--jobs", "2"], "--jobs"),
        (["--keep"], "--keep"),
    ],
)
def test_run_on_existing_lab_refuses_options_of_other_runs(options, named):
    arguments = ["run", "quickstart", "--on", "some-lab", *options]
    with pytest.raises(InputError, match=f"--on cannot be combined with {named}"):
        command_line.main(arguments, standalone_mode=False)


def test_path_without_permission_is_named_without_traceback(monkeypatch, capsys):
    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/root/x.html")

    monkeypatch.setattr(command_line, "main", refuse)
    with pytest.raises(SystemExit) as raised:
        main()
    # 3 is the status of problems of the host.
    assert raised.value.code == 3
    assert capsys.readouterr().err == (
        "testbed: /root/x.html: Permission denied: name another path\n"
    )


def test_full_disk_is_reported_without_traceback(monkeypatch, capsys):
    def fail(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command_line, "main", fail)
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 3
    assert capsys.readouterr().err.startswith(
        "testbed: the disk is full; written results of a run are kept"
    )


@pytest.mark.parametrize(
    ("command", "names"),
    [("models", CATALOG), ("methods", METHODS), ("profiles", [*PROFILES, *PRESETS])],
)
def test_catalogues_list_all_names_within_80_columns(call, command, names):
    output = call("show", command)
    for name in names:
        assert name in output
    for line in output.splitlines():
        assert len(line.rstrip()) <= 80
    assert call_json(call, "show", command)


def test_every_profile_and_preset_has_source():
    for profile in PROFILES.values():
        assert profile.source
        assert profile.basis
    for preset in PRESETS.values():
        assert preset.source


@pytest.mark.parametrize("name", METHODS)
def test_options_of_methods_are_described(name):
    schema = METHODS[name].Options.model_json_schema()
    for key, option in schema.get("properties", {}).items():
        # A list of values explains itself.
        assert option.get("description") or "enum" in option, key


def test_schema_is_json_schema(call):
    schema = json.loads(call("show", "schema"))
    assert schema["properties"]["network"]
    # Editors then mark unknown keys.
    assert schema["additionalProperties"] is False


def test_show_data_lists_data_sets_and_describes_one(call):
    rows = {row["name"]: row for row in call_json(call, "show", "data")}
    assert rows["digits"]["complete"]
    assert rows["mnist"]["folder"] == "data/mnist"
    output = call("show", "data", "digits", "--count", "1")
    # scikit-learn's digits have 1,797 samples, of which 80 % are for training.
    assert "train: 1,438 samples" in output
    assert output.count("class ") == 1
    facts = call_json(call, "show", "data", "synthetic-3x4x5")
    assert facts["shape"] == [3, 4, 5]
    assert sum(facts["per_class"]["train"]) == facts["samples"]["train"]
    assert "digits" in call("show", "data")


TOKENS_AND_NETWORK = """
import click
import numpy as np
from torch import nn

def tokens():
    samples, labels = np.arange(80).reshape(10, 8) % 50, np.arange(10) % 4
    return (samples, labels), (samples, labels)

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.answer = nn.Embedding(50, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.answer(self.embed(x).mean(1))
"""


def test_user_defined_network_is_shown_for_user_defined_data(call, tmp_path):
    file = tmp_path / "text.py"
    file.write_text(TOKENS_AND_NETWORK)
    arguments = ("show", "models", str(file), "Text", "--data")
    facts = call_json(call, *arguments, f"{file}:tokens")
    assert facts["input"] == [8]
    assert facts["classes"] == 4
    # The embedding has 50 tokens of 6 values; the linear layer has weights (6) and a bias for 4 classes.
    assert facts["parameters"] == 50 * 6 + (6 + 1) * 4
    # Data of the same shape and number of classes in a NumPy file.
    data = tmp_path / "text.npz"
    samples = np.zeros((20, 8), np.int64)
    np.savez(data, x_train=samples, y_train=np.arange(20) % 4)
    assert call_json(call, *arguments, str(data)) == facts


def test_list_of_commands_has_first_sentence_of_each() -> None:
    # The list is written by hand, so that commands are imported only when they are called.
    context = click.Context(command_line)
    for name, (_, line) in COMMANDS.items():
        command = command_line.get_command(context, name)
        assert command is not None
        assert first_sentence(command) == line
