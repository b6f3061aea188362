"""PipeLearn's Table IV on a reduced grid, with epochs predicted by two simulated iterations."""

import pytest

from testbed.ml.data import load
from testbed.ml.rounds.metrics import DECLARED
from testbed.plan import Plan
from testbed.scenario.schema import Scenario
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from tests.helpers.server_scenarios import make_scenario, prepare_scenario

GRID = ((1, 1), (1, 7), (1, 25), (1, 91), (2, 12))
"""Split points and batch numbers; (1, 91) is predicted to be best, since its epochs omit most samples."""

# Speeds and memory rates of the server and the Raspberry Pi in the paper's scenarios.
DEVICES = {
    "devices": {
        "server": {"speed": "66.4gflops", "memory_rate": "1.61GB/s"},
        "device": {"speed": "3.32gflops", "memory_rate": "80.7MB/s"},
    }
}


def simulate_metrics(options: dict, *, samples: int = 10_000, **work: object) -> dict:
    """Return the metrics of a run with the device and the server of the paper, over 4G."""
    spec = make_scenario(
        "pipelearn",
        1,
        workload={
            "model": {"name": "vgg5"},
            "data": {
                "name": "synthetic-3x32x32",
                "train": samples,
                "test": 1,
                "split": "iid",
            },
            "batch_size": 100,
            "numerics": "none",
            **(work or {"steps": 2}),
        },
        options=options if work else {"local_steps": 2, **options},
        network={"topology": "star", "link": {"preset": "4g"}},
    )
    keys = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    prepared = prepare_scenario(Scenario.model_validate(keys | DEVICES))
    outcome = simulate(prepared, load(spec.workload.data, blank=True))
    plan = Plan.model_validate_json(prepared.plan.model_dump_json())
    return metrics(outcome, prepared.trial.experiment, plan, DECLARED)


def test_choice_scores_at_least_96_percent_of_simulated_candidates() -> None:
    grid = [
        simulate_metrics({"split_point": split, "parallel_batches": count})
        for split, count in GRID
    ]
    chosen = simulate_metrics({"parallel_batch_candidates": "all-sizes"})["epoch_time"]
    assert min(values["epoch_time"] for values in grid) / chosen >= 0.96


def test_default_choice_follows_equation_14() -> None:
    default = simulate_metrics({})
    assert default == simulate_metrics({"parallel_batch_candidates": "equation-14"})
    best = simulate_metrics({"parallel_batch_candidates": "all-sizes"})
    assert default["epoch_time"] > best["epoch_time"]


def test_two_iterations_predict_epoch_time() -> None:
    options = {"split_point": 1, "parallel_batches": 3}
    full_epoch = simulate_metrics(options, samples=900, epochs=1)
    two_iterations = simulate_metrics(options, samples=900)
    assert full_epoch["epoch_time"] == pytest.approx(full_epoch["round_time"], rel=1e-9)
    assert two_iterations["epoch_time"] == pytest.approx(
        full_epoch["round_time"], rel=1e-3
    )
