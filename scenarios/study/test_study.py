"""What the study claims, as tests: run them with `pytest`."""

from pathlib import Path

from controller.api import load, simulate

STUDY = Path(__file__).parent / "study.yaml"


def test_the_devices_learn_together(tmp_path):
    """A hundred steps are enough for half of the digits."""
    run = simulate(load(STUDY, {"workload.steps": 100}), tmp_path / "run")
    assert run.figures["accuracy"] > 0.5


def test_the_same_seed_gives_the_same_run(tmp_path):
    """Nothing depends on the machine that simulates."""
    few = load(STUDY, {"workload.steps": 20})
    one, other = (simulate(few, tmp_path / name) for name in ("one", "other"))
    assert one.figures["duration"] == other.figures["duration"]
