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
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def requesting(rate: str | None) -> Experiment:
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


def test_unmeasured_host_refuses_no_rate() -> None:
    capability.check(requesting("100gbit"), "auto")


def test_rate_above_the_measurement_is_refused_with_the_maximum() -> None:
    capability.store(MEASURED)
    assert capability.known() == [MEASURED]
    for rate in ("2gbit", None):
        capability.check(requesting(rate), "auto")
    with pytest.raises(InputError, match=r"a -> b needs 5gbit, .* use at most 2gbit"):
        capability.check(requesting("5gbit"), "auto")
    capability.check(requesting("5gbit"), "netem")


def test_each_backend_is_kept_for_itself() -> None:
    capability.store(MEASURED)
    capability.store(Capability("netem", 10e9, 1e-4, 1e-4, 10e-6, 200))
    capability.check(requesting("5gbit"), "auto")
    with pytest.raises(InputError):
        capability.check(requesting("5gbit"), "userspace")


def test_another_kernel_makes_the_figures_void(tmp_path: Path) -> None:
    capability.store(MEASURED)
    path = tmp_path / "testbed" / "links.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "host": ["here", "2.6.32", 1]})
    )
    assert capability.known() == []
    path.write_text("nonsense")
    assert capability.known() == []


def test_backend_without_a_rate_within_tolerance_refuses_all_tested_rates() -> None:
    capability.store(Capability("userspace", None, None, None, None, None))
    for rate in ("10gbit", "10mbit"):
        with pytest.raises(InputError, match="use less than 10mbit"):
            capability.check(requesting(rate), "userspace")
    for rate in ("1mbit", None):
        capability.check(requesting(rate), "userspace")
    capability.check(requesting("10gbit"), "netem")


@pytest.mark.parametrize(
    "entry", [{"backend": "userspace", "speed": 2e9}, ["userspace"], None, "fast"]
)
def test_measurement_of_another_version_is_ignored(
    entry: object, tmp_path: Path
) -> None:
    capability.store(MEASURED)
    path = tmp_path / "testbed" / "links.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "netem": entry}))
    assert capability.known() == [MEASURED]
    path.write_text(json.dumps([stored]))
    assert capability.known() == []
