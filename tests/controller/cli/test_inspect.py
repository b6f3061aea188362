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
from testbed_controller.cli.main import COMMANDS, RENAMED, main, testbed
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


def test_plan_shows_who_holds_what(call):
    shown = call("plan", "quickstart")
    assert "source *" in shown
    assert "predicted step time" in shown
    assert "stage 0  F0 F1 F2 F3" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_plan_as_json_adds_up(call):
    (plan,) = json.loads(
        call("plan", "quickstart", "--set", "workload.batch_size=64", "--json")
    )
    rows = plan["assignments"]
    assert [row["start"] for row in rows[1:]] == [row["stop"] for row in rows[:-1]]
    assert rows[0]["start"] == 0
    whole = json.loads(call("show", "models", "cnn", "--json"))
    assert sum(row["parameters"] for row in rows) == whole["parameters"]
    assert sum(row["flops"] for row in rows) == pytest.approx(
        3 * 64 * whole["forward_flops"]
    )
    assert plan["schedule"].startswith("stage 0")


def test_layers_that_are_measured_here_give_a_speed(call):
    assert (
        json.loads(call("show", "models", "mlp", "--measure", "8", "--json"))["speed"]
        > 0
    )


def test_plan_of_a_sweep_plans_each_point_once(call):
    overrides = (
        "--set",
        "sweep={workload.method.schedule: [gpipe, 1f1b]}",
        "--set",
        "repetitions=3",
    )
    plans = json.loads(call("plan", "quickstart", *overrides, "--json"))
    assert [plan["point"]["workload.method.schedule"] for plan in plans] == [
        "gpipe",
        "1f1b",
    ]
    assert plans[0]["schedule"] != plans[1]["schedule"]


def test_plan_without_a_pipeline_draws_no_schedule(call):
    shown = call("plan", "smoke/single-mlp")
    assert "stage" not in shown
    assert "alone *" in shown


def test_validate_says_ok_or_what_is_wrong(call, tmp_path):
    shown = call("validate", "quickstart", "smoke/pause")
    assert shown.splitlines() == [
        "ok scenarios/quickstart.yaml: 4 devices, 12 directed links, 1 fault, 1 run",
        "ok scenarios/smoke/pause.yaml: 3 devices, 6 directed links, 1 fault, 1 run",
    ]
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\ndevices: {a: {}}\n")
    assert f"{bad}:1: workload: is missing" in call("validate", str(bad), status=2)
    results = json.loads(call("validate", "quickstart", str(bad), "--json", status=2))
    assert [result["ok"] for result in results] == [True, False]
    assert results[1]["errors"][0].startswith(f"{bad}:1: workload: is missing")


def test_validate_names_the_extra_of_a_metric(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    shown = call(
        "validate",
        "quickstart",
        "--set",
        "workload.training.metrics={recall: {}}",
        status=2,
    )
    assert "pip install 'edge-testbed[metrics]'" in " ".join(shown.split())


def test_validate_names_losses_that_the_virtual_clock_does_not_follow(call):
    assert "not in the model" in call(
        "validate", "quickstart", "--set", "network.link.loss=20%"
    )
    assert "not in the model" not in call(
        "validate",
        "quickstart",
        "--set",
        "network.link={rate: 50mbit, delay: 10ms, loss: 1%}",
    )


def test_validate_checks_every_point_of_a_sweep(call):
    shown = call(
        "validate",
        "quickstart",
        "--set",
        "sweep={workload.method.stages: [2, 9]}",
        status=2,
    )
    assert "(sweep: 9): workload.method.stages: " in shown


def test_more_stages_than_devices_or_units(call):
    shown = call("validate", "quickstart", "--set", "devices.worker.count=8", status=2)
    assert "scenarios/quickstart.yaml" in shown
    assert "write stages: 6, and the devices beyond stand by" in shown
    assert shown.count("\n") == 1
    call(
        "validate",
        "quickstart",
        "--set",
        "devices.worker.count=8",
        "--set",
        "workload.method.stages=6",
    )


def test_one_method_by_its_name(call):
    shown = call("show", "methods", "pipeline")
    assert shown.strip().startswith("pipeline")
    assert "(one of even, optimal; default optimal)" in " ".join(shown.split())
    assert "edgepipe" not in shown
    with pytest.raises(
        InputError, match="unknown method 'pipelin': did you mean 'pipeline'"
    ):
        command_line.main(["show", "methods", "pipelin"], standalone_mode=False)


def test_bad_input_ends_with_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv",
        ["testbed", "plan", "quickstart", "--set", "network.link.rate=50Mbps"],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(
        "testbed: --set network.link.rate=50Mbps: network.link.rate: 'Mbps' is not a unit of rate"
    )
    assert "\n" not in error


@pytest.mark.parametrize(
    "group", [(), ("link",), ("fault",), ("show",), ("setup",), ("export",)]
)
def test_help_shows_whole_sentences(call, group):
    shown = call(*group, "--help")
    assert not any(
        line.endswith("...") for line in shown.partition("Commands:")[2].splitlines()
    )
    assert max(map(len, shown.splitlines())) <= 80


def test_commands_are_at_most_eighteen():
    assert len(COMMANDS) <= 18
    assert not {*RENAMED} & {*COMMANDS}


@pytest.mark.parametrize(
    ("former", "present"),
    [
        *RENAMED.items(),
        ("link probe", "testbed link measure"),
    ],
)
def test_former_names_of_commands_are_refused_with_the_present_ones(former, present):
    with pytest.raises(click.UsageError) as refused:
        command_line.main(former.split(), standalone_mode=False)
    assert (
        refused.value.message
        == f"'{former.split()[-1 if former == 'link probe' else 0]}' has been replaced: use '{present}'"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--runtime", "simulate"], "--runtime simulate"),
        (["--jobs", "2"], "--jobs"),
        (["--keep"], "--keep"),
    ],
)
def test_a_run_on_a_standing_lab_refuses_options_of_other_runs(options, named):
    with pytest.raises(InputError, match=f"--on cannot be combined with {named}"):
        command_line.main(
            ["run", "quickstart", "--on", "some-lab", *options], standalone_mode=False
        )


def test_path_without_permission_is_named_without_a_traceback(monkeypatch, capsys):
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/root/x.html")

    monkeypatch.setattr(command_line, "main", refused)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == (
        "testbed: /root/x.html: Permission denied: name another path\n"
    )


def test_a_full_disk_is_no_traceback(monkeypatch, capsys):
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command_line, "main", full)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert capsys.readouterr().err.startswith(
        "testbed: the disk is full; written results of a run are kept"
    )


@pytest.mark.parametrize(
    ("command", "names"),
    [("models", CATALOG), ("methods", METHODS), ("profiles", [*PROFILES, *PRESETS])],
)
def test_catalogues_name_everything_within_80_columns(call, command, names):
    shown = call("show", command)
    assert all(name in shown for name in names)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert json.loads(call("show", command, "--json"))


def test_every_profile_and_preset_has_a_source():
    assert all(profile.source and profile.basis for profile in PROFILES.values())
    assert all(preset.source for preset in PRESETS.values())


def test_options_are_described():
    for method in METHODS.values():
        for name, schema in (
            method.Options.model_json_schema().get("properties", {}).items()
        ):
            assert schema.get("description") or "enum" in schema, (
                f"{method.name}.{name}"
            )


def test_schema_is_a_json_schema(call):
    schema = json.loads(call("show", "schema"))
    assert schema["properties"]["network"]
    assert schema["additionalProperties"] is False


def test_data_list_and_show(call):
    names = {row["name"]: row for row in json.loads(call("show", "data", "--json"))}
    assert names["digits"]["complete"]
    assert names["mnist"]["folder"] == "data/mnist"
    shown = call("show", "data", "digits", "--count", "1")
    assert "train: 1,438 samples" in shown
    assert shown.count("class ") == 1
    facts = json.loads(call("show", "data", "synthetic-3x4x5", "--json"))
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


def test_a_network_of_ones_own_is_shown_for_data_of_ones_own(call, tmp_path):
    file = tmp_path / "text.py"
    file.write_text(TOKENS_AND_NETWORK)
    shown = json.loads(
        call("show", "models", str(file), "Text", "--data", f"{file}:tokens", "--json")
    )
    assert (shown["input"], shown["classes"], shown["parameters"]) == (
        [8],
        4,
        50 * 6 + 7 * 4,
    )
    np.savez(
        tmp_path / "text.npz",
        x_train=np.zeros((20, 8), np.int64),
        y_train=np.arange(20) % 4,
    )
    assert (
        json.loads(
            call(
                "show",
                "models",
                str(file),
                "Text",
                "--data",
                str(tmp_path / "text.npz"),
                "--json",
            )
        )
        == shown
    )


def test_the_list_of_commands_has_the_first_sentence_of_each() -> None:
    context = click.Context(testbed)
    for name, (_, line) in COMMANDS.items():
        command = testbed.get_command(context, name)
        assert command is not None
        assert first_sentence(command) == line
