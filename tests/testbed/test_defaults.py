"""What methods learn as they come: no optimizer, schedule or loss named."""

from __future__ import annotations

import pytest

from testbed.ml.data import load as load_data
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.simulation import simulate
from tests.helpers.runs import fields_of, make_scenario


def learned(method, epochs, **training):
    data = {"name": "digits"} | (
        {"split": "iid"} if method in ("federated", "split-learning") else {}
    )
    work = {
        "model": {"name": "mlp"},
        "data": data,
        "batch_size": 32,
        "epochs": epochs,
        "steps": None,
    }
    written = make_scenario(
        3, "1gflops", workload={**work, "training": training}, method={"name": method}
    )
    prepared = prepare(trials(written)[0])
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return fields_of(outcome, "evaluate")[-1]["accuracy"], [
        each["text"] for each in fields_of(outcome, "log")
    ]


@pytest.mark.parametrize(
    ("method", "epochs"),
    [("single", 10), ("ftpipehd", 10), ("split-learning", 10), ("federated", 20)],
)
def test_defaults_learn_handwritten_digits(method, epochs):
    accuracy, said = learned(method, epochs)
    assert accuracy >= 0.9
    assert not any("momentum" in text for text in said)


def test_momentum_does_harm_in_an_asynchronous_pipeline_and_is_warned_of():
    accuracy, said = learned("ftpipehd", 10, optimizer={"momentum": 0.9})
    assert accuracy < 0.5
    assert any(
        "momentum 0.9 carries each update on for 10 batches, and gradients are up to 3 old"
        in text
        for text in said
    )
