"""The program in timeslots under faults: no wait has no end, whoever is struck and whenever."""

from __future__ import annotations

import random

import pytest
import torch

from testbed.ml.layers.layer_shard import LayerShard
from testbed.ml.slots import neurons
from testbed.ml.slots.program import gradient_of_cross_entropy
from tests.helpers.runs import fields_of, run_simulated, scenario

MODEL = {"name": "mlp", "hidden": [16, 16]}
GIVING_UP = (
    "the evaluation after step 10 is lost",
    "is left with no device",
    "is down; it is the coordinator of the run",
)


def two(name, workers=1, **keys):
    method = {"name": name, "timeslot_margin": "10ms"}
    return scenario(
        workers, workload={"model": MODEL, "steps": 8}, method=method, **keys
    )


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
@pytest.mark.parametrize("lasts", ["0.001s", "1s"])
def test_a_lead_that_returns_after_the_last_slot_reports_the_lost_evaluation(
    name, lasts
):
    kill = {
        "kill": "source",
        "when": {"device": "worker1", "begins": "backward", "batch": 1},
        "for": lasts,
    }
    outcome = run_simulated(two(name, faults=[kill]))
    assert outcome.status == "failed"
    assert (
        "the evaluation after step 8 is lost: the coordinator source was off or had no neurons"
        in outcome.error
    )
    assert max(event.time for event in outcome.events) < 10


def test_the_gradient_of_cross_entropy_equals_autograds_to_the_bit():
    results = torch.randn(
        50, 10, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    labels = torch.arange(50) % 10
    loss = torch.nn.functional.cross_entropy(results, labels, reduction="sum") / 70
    (wanted,) = torch.autograd.grad(loss, [results])
    logarithms = torch.log_softmax(results.detach(), dim=1)
    assert torch.equal(gradient_of_cross_entropy(logarithms, labels, 1 / 70), wanted)


@pytest.mark.parametrize("frame", [None, "400B"])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "edgepipe", "allocation": "horizontal"},
        {"name": "edgepipe", "allocation": "hybrid"},
        {"name": "versatile", "allocation": "horizontal"},
        {
            "name": "versatile",
            "allocation": "horizontal",
            "substitute_past_outputs": True,
        },
    ],
)
def test_equal_test_inputs_are_computed_once_with_equal_results(
    monkeypatch, method, frame
):
    inferred = []
    infer = LayerShard.infer
    monkeypatch.setattr(
        LayerShard, "infer", lambda *given: inferred.append(given) or infer(*given)
    )
    network = {"link": {"message_loss": "30%"}, "frame": frame}
    workload = {"model": MODEL, "steps": 8}
    several = {
        "timeslot_margin": "10ms",
        "test_runs": 12,
        "test_batch_size": 25,
        "evaluate_every": 4,
    }
    of_all = []
    for most in (neurons.MOST_KEPT, 0):
        monkeypatch.setattr(neurons, "MOST_KEPT", most)
        inferred.clear()
        outcome = run_simulated(
            scenario(2, workload=workload, method=method | several, network=network)
        )
        assert outcome.status == "finished"
        of_all.append((list(outcome.events), len(inferred)))
    (kept, computed), (anew, each_time) = of_all
    assert kept == anew
    assert (computed < each_time) == ("substitute_past_outputs" not in method)


def test_a_lead_without_peers_stops_after_its_slots():
    faults = [
        {
            "kill": "source",
            "when": {"device": "worker1", "begins": "backward", "batch": 1},
            "for": "1ms",
        },
        {"kill": "worker1", "at": "2s"},
    ]
    workload = {"model": MODEL, "steps": 40}
    outcome = run_simulated(
        scenario(
            1,
            workload=workload,
            method={"name": "versatile", "timeslot_margin": "100ms"},
            faults=faults,
        )
    )
    assert outcome.status == "failed"
    assert "the evaluation after step 40 is lost" in outcome.error


def random_fault(draw, names):
    one, other = draw.sample(names, 2)
    fault = draw.choice(
        [{"kill": one}, {"kill": one}, {"pause": one}, {"partition": [[one]]}]
    )
    moments = [{"at": f"{draw.randint(0, 3000)}ms"}]
    moments.append(
        {
            "when": {
                "device": other,
                "begins": draw.choice(["forward", "backward"]),
                "batch": draw.randint(0, 9),
            }
        }
    )
    lasting = draw.choice(["1ms", "300ms", "1s", "4s", None])
    return fault | draw.choice(moments) | ({} if lasting is None else {"for": lasting})


@pytest.mark.parametrize("name", ["edgepipe", "versatile"])
@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_of_faults_makes_a_run_hang(name, seed):
    draw = random.Random(f"{name} {seed}")
    workers = draw.randint(1, 3)
    names = ["source", *(f"worker{number}" for number in range(1, workers + 1))]
    method = {
        "name": name,
        "recovery": draw.choice(["none", "r-tx", "ack"]),
        "evaluate_every": draw.choice([None, 5]),
    }
    method["allocation"] = draw.choice(["hybrid", "horizontal"])
    faults = [random_fault(draw, names) for _ in range(draw.randint(1, 3))]
    outcome = run_simulated(
        scenario(
            workers,
            workload={"model": MODEL, "steps": 10},
            method=method,
            faults=faults,
        )
    )
    assert outcome.status in ("finished", "failed")
    if outcome.status == "finished":
        assert fields_of(outcome, "evaluate")[-1]["step"] == 10
    else:
        assert any(said in outcome.error for said in GIVING_UP)
