"""Measured capability of the host to shape links, and refusal of faster links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.common.errors import InputError
from testbed.experiment import Experiment
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed_controller.lab import capability
from testbed_controller.shaping.capability import Capability

MEASURED = Capability("userspace", 2e9, 1e-4, 1.2e-4, 40e-6, 45)


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def stored_file(tmp_path: Path) -> Path:
    return tmp_path / "testbed" / "links.json"


def experiment_with(rate: str | None) -> Experiment:
    """Return an experiment with links of a rate, or without a rate."""
    link = {"delay": "1ms"} if rate is None else {"rate": rate}
    scenario = {
        "name": "fast",
        "devices": {"a": {}, "b": {}},
        "network": {"link": link},
        "workload": {
            "task": "infer",
            "model": {"name": "mlp"},
            "method": {"name": "exchange"},
        },
    }
    return trials(Scenario.model_validate(scenario))[0].experiment


def test_host_without_measurement_accepts_any_rate() -> None:
    capability.check_rates(experiment_with("100gbit"), "auto")


def test_rate_above_measurement_is_refused_with_maximum() -> None:
    capability.store(MEASURED)
    assert capability.load_measurements() == [MEASURED]
    for rate in ("2gbit", None):
        capability.check_rates(experiment_with(rate), "auto")
    with pytest.raises(InputError, match=r"a -> b needs 5gbit, .* use at most 2gbit"):
        capability.check_rates(experiment_with("5gbit"), "auto")
    # This backend has not been measured.
    capability.check_rates(experiment_with("5gbit"), "netem")


def test_each_backend_has_own_measurement() -> None:
    capability.store(MEASURED)
    capability.store(Capability("netem", 10e9, 1e-4, 1e-4, 10e-6, 200))
    # With "auto", the faster of both.
    capability.check_rates(experiment_with("5gbit"), "auto")
    with pytest.raises(InputError):
        capability.check_rates(experiment_with("5gbit"), "userspace")


def test_measurements_on_another_kernel_are_ignored(tmp_path: Path) -> None:
    capability.store(MEASURED)
    file = stored_file(tmp_path)
    stored = json.loads(file.read_text())
    # Name, kernel and number of processors.
    file.write_text(json.dumps({**stored, "host": ["here", "2.6.32", 1]}))
    assert capability.load_measurements() == []
    file.write_text("nonsense")
    assert capability.load_measurements() == []


def test_backend_without_rate_within_tolerance_refuses_all_tested_rates() -> None:
    # 10 Mbit/s is the lowest rate that is measured.
    capability.store(Capability("userspace", None, None, None, None, None))
    for rate in ("10gbit", "10mbit"):
        with pytest.raises(InputError, match="use less than 10mbit"):
            capability.check_rates(experiment_with(rate), "userspace")
    for rate in ("1mbit", None):
        capability.check_rates(experiment_with(rate), "userspace")
    capability.check_rates(experiment_with("10gbit"), "netem")


@pytest.mark.parametrize(
    "entry", [{"backend": "userspace", "speed": 2e9}, ["userspace"], None, "fast"]
)
def test_measurement_of_another_version_is_ignored(
    entry: object, tmp_path: Path
) -> None:
    capability.store(MEASURED)
    file = stored_file(tmp_path)
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "netem": entry}))
    assert capability.load_measurements() == [MEASURED]
    file.write_text(json.dumps([stored]))
    assert capability.load_measurements() == []
