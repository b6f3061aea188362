"""Options of `testbed run` that select an executor, and options that cannot be combined."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest

from testbed.common.errors import InputError
from testbed_controller.cli.run import run
from testbed_controller.results import files

RING = ("examples/ring", "--runtime", "simulate", "--repetitions", "3", "--no-events")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--out", "here", "--resume", "."), "--out cannot be combined with --resume"),
        (("--jobs", "2"), "--jobs: containers need the host to themselves"),
        (
            ("--cluster", "tcp://x:1"),
            "--cluster: containers need the host to themselves",
        ),
        (
            ("--jobs", "2", "--runtime", "simulate", "--watch"),
            "--jobs: parallel runs can be neither watched",
        ),
        (("--each-on-one-host",), "--each-on-one-host requires runs in containers"),
        (
            ("--each-on-one-host", "--hosts", "one", "--keep"),
            "--each-on-one-host: places all devices of a run",
        ),
        (
            ("--runtime", "simulate", "--keep"),
            "--keep cannot be combined with --runtime simulate",
        ),
        (
            ("--runtime", "simulate", "--hosts", "one,two"),
            "--hosts cannot be combined with --runtime simulate",
        ),
        (
            ("--runtime", "simulate", "--links", "userspace"),
            "--links cannot be combined with --runtime simulate",
        ),
        (
            ("--runtime", "simulate", "--accept-links"),
            "--accept-links cannot be combined with --runtime simulate",
        ),
        (("--place", "a=one"), "--place: name the hosts with --hosts"),
    ],
)
def test_options_that_cannot_be_combined_are_refused_before_planning(
    options, reason: str
) -> None:
    # The missing scenario would be reported otherwise.
    with pytest.raises(InputError, match=reason):
        run.main(["no-such-scenario", *options], standalone_mode=False)


def test_simulation_ignores_container_options_of_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TESTBED_HOSTS", "one,two")
    monkeypatch.setenv("TESTBED_LINKS", "userspace")
    # The options themselves would be refused before the scenario is read.
    with pytest.raises(InputError, match="no such scenario"):
        run.main(["no-such-scenario", "--runtime", "simulate"], standalone_mode=False)


@pytest.mark.parametrize(
    ("option", "value"), [("--repetitions", "0"), ("--seed", "-1")]
)
def test_values_out_of_range_name_their_option(option: str, value: str) -> None:
    with pytest.raises(click.BadParameter) as raised:
        run.main(["no-such-scenario", option, value], standalone_mode=False)
    assert option in raised.value.format_message()


def test_resume_runs_only_missing_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run.main([*RING, "--out", str(out)], standalone_mode=False)
    first, second, third = files.run_folders(out)
    # A manifest has the time of its run.
    manifests = {}
    for folder in (first, second, third):
        manifests[folder] = (folder / "manifest.json").read_bytes()
    metrics = (second / "metrics.json").read_bytes()
    shutil.rmtree(second)
    run.main([*RING, "--resume", str(out), "--jobs", "2"], standalone_mode=False)
    repeated = []
    for folder, manifest in manifests.items():
        if (folder / "manifest.json").read_bytes() != manifest:
            repeated.append(folder)
    assert repeated == [second]
    assert (second / "metrics.json").read_bytes() == metrics
