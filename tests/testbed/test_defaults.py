"""Training with the default optimizer, schedule and loss of each method."""

from __future__ import annotations

import pytest

from testbed.ml.data import load as load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario


def train_on_digits(method, epochs, **training):
    """Return the final accuracy and the texts of the log."""
    data = {"name": "digits"}
    # In these methods, devices train on their own samples.
    if method in ("federated", "split-learning"):
        data["split"] = "iid"
    workload = {
        "model": {"name": "mlp"},
        "data": data,
        "batch_size": 32,
        "epochs": epochs,
        "steps": None,
        "training": training,
    }
    scenario = make_scenario(3, "1gflops", workload=workload, method={"name": method})
    (trial,) = trials(scenario)
    prepared = prepare(trial)
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    accuracy = fields_of(outcome, "evaluate")[-1]["accuracy"]
    return accuracy, [fields["text"] for fields in fields_of(outcome, "log")]


@pytest.mark.parametrize(
    ("method", "epochs"),
    [("single", 10), ("ftpipehd", 10), ("split-learning", 10), ("federated", 20)],
)
def test_default_training_reaches_90_percent_on_digits(method, epochs):
    accuracy, log_texts = train_on_digits(method, epochs)
    assert accuracy >= 0.9
    assert not any("momentum" in text for text in log_texts)


def test_harmful_momentum_of_asynchronous_pipeline_is_logged():
    accuracy, log_texts = train_on_digits(
        "ftpipehd", epochs=10, optimizer={"momentum": 0.9}
    )
    # Training fails: gradients are older than the updates that momentum still applies.
    assert accuracy < 0.5
    # A momentum of 0.9 has an effect over 1 / (1 - 0.9) batches.
    warning = "with momentum 0.9 an update affects 10 batches, but gradients are up to 3 batches old"
    assert any(warning in text for text in log_texts)
