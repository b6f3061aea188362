"""Metrics of text generation, and plots of these metrics."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

import testbed
from testbed_controller.cli.main import testbed as commands

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def metrics() -> dict[str, object]:
    return dict(testbed.simulate(testbed.load("generation/kill")).run.metrics)


def test_devices_always_compute_send_or_wait(metrics: dict) -> None:
    (request,) = metrics["generation_list"]
    seconds_per_token = request["latency"] / request["tokens"]
    for device in ("pi1", "pi2", "pi3", "pi4"):
        total = 0.0
        for activity in ("compute", "send", "wait"):
            total += metrics[f"{activity}_per_token"][device]
        # Computing and sending may overlap, so the sum may be larger.
        assert total >= seconds_per_token * 0.999


def test_caches_have_room_for_the_longest_sequence(metrics: dict) -> None:
    layers, heads, values_per_head, bytes_per_value = 5, 4, 8, 4
    tokens = 16 + 80  # of the prompt, and generated
    # Each head has a key and a value for each token.
    token_bytes = layers * heads * 2 * values_per_head * bytes_per_value
    assert sum(metrics["cache_bytes"].values()) == tokens * token_bytes


def test_tokens_over_time_begin_at_the_first_arrival(metrics: dict) -> None:
    (request,) = metrics["generation_list"]
    assert metrics["token_list"][0] == {"time": request["arrival"], "tokens": 0}
    assert metrics["token_list"][-1]["tokens"] == 80


@pytest.mark.parametrize("numerics", ["full", "none"])
def test_two_runs_can_be_compared(tmp_path: Path, numerics: str) -> None:
    changes = {"workload.numerics": numerics, "workload.tokens": 4, "faults": []}
    scenario = testbed.load("generation/kill", {**changes, "expect": {}})
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        testbed.simulate(scenario, folder)
    arguments = ["compare", *map(str, folders)]
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert "ttft" in result.output.lower()


def test_plots_are_drawn_from_summaries_of_sweeps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    keys = ["workload.method", "network.link.delay", "network.link.loss"]
    rows = [["layers", "1ms", "0%", "1", "2.0"], ["tensors", "1ms", "0%", "2", "4.0"]]
    write_summary(
        tmp_path / "delay", [*keys, "devices.pi.count", "request_token_rate"], rows
    )
    header = ["workload.method", "faults.0.when.micro", "longest_pause"]
    write_summary(tmp_path / "recovery", header, [["restart", "1", "3.5"]])
    script = runpy.run_path(str(ROOT / "generation/plots/draw.py"))
    script["main"](tmp_path / "delay", tmp_path / "recovery", tmp_path)
    assert "tensors, 2 boards" in (tmp_path / "delay.svg").read_text()
    assert "restart" in (tmp_path / "recovery.svg").read_text()


def write_summary(folder: Path, header: list[str], rows: list[list[str]]) -> None:
    folder.mkdir()
    with (folder / "summary.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
