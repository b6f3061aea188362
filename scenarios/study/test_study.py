"""Claims of the study as tests, which `pytest` runs."""

from pathlib import Path

import testbed

STUDY = Path(__file__).parent / "study.yaml"


def test_the_devices_learn_together(tmp_path):
    """After a hundred steps, the network recognizes more than half of the digits."""
    run = testbed.simulate(
        testbed.load(STUDY, {"workload.steps": 100}), tmp_path / "run"
    )
    assert run.metrics["accuracy"] > 0.5


def test_the_same_seed_gives_the_same_run(tmp_path):
    """The duration of a run does not depend on the host."""
    few = testbed.load(STUDY, {"workload.steps": 20})
    one, other = (testbed.simulate(few, tmp_path / name) for name in ("one", "other"))
    assert one.metrics["duration"] == other.metrics["duration"]
