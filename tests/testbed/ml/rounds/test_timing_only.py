"""Runs without numbers take the time, and send the messages, of runs with them."""

import time

import pytest

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from tests.helpers.server_scenarios import (
    data,
    fields_of,
    make_scenario,
    prepare_scenario,
    run_simulated,
)

METHODS = ("federated", "split-learning", "split-federated", "pipelearn", "single")
CUT = {"partition": [["device2"], ["server", "device1"]]}


def without(spec):
    return spec.model_copy(
        update={"workload": spec.workload.model_copy(update={"numerics": "none"})}
    )


def told(outcome):
    """Return what happened when, without what was learnt."""
    return [
        (
            event.time,
            event.device,
            event.event,
            {
                key: value
                for key, value in event.fields.items()
                if key not in ("loss", "accuracy")
            },
        )
        for event in outcome.events
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "model",
    [{"name": "vgg5"}, {"name": "mobilenetv2", "width": 0.1}],
    ids=lambda model: model["name"],
)
def test_a_run_without_numbers_has_the_events_of_one_with_them(
    method: str, model: dict
) -> None:
    faults = (
        []
        if method == "single"
        else [
            {"kill": "device1", "at": "40s", "for": "3s"},
            {**CUT, "at": "90s", "for": "9s"},
        ]
    )
    spec = make_scenario(
        method, 2, workload={"model": model, "steps": 3}, faults=faults
    )
    full, timing = run_simulated(spec), run_simulated(without(spec))
    assert told(timing) == told(full)
    assert timing.weights is None
    assert not any("loss" in each for each in fields_of(timing, "step"))
    assert not any("accuracy" in each for each in fields_of(timing, "evaluate"))


@pytest.mark.parametrize(
    "name",
    ["ftpipehd-faults", "gpipe-kill-for-good", "distributed-kill", "sequential-infer"],
)
def test_so_have_the_other_families_with_their_faults(name: str) -> None:
    spec = load_scenario(f"smoke/{name}").model_copy(update={"sweep": {}})
    full, timing = run_simulated(spec), run_simulated(without(spec))
    assert told(timing) == told(full)
    assert timing.weights is None
    assert not any({"loss", "accuracy"} & set(event.fields) for event in timing.events)


def test_a_method_whose_time_is_that_of_its_slots_is_refused() -> None:
    with pytest.raises(InputError, match="does not support timing-only runs"):
        prepare_scenario(without(load_scenario("smoke/edgepipe")))


@pytest.mark.timed
def test_an_epoch_of_resnet18_takes_seconds() -> None:
    work = {
        "model": {"name": "resnet18"},
        "data": {
            "name": "synthetic-3x32x32",
            "train": 40_000,
            "test": 100,
            "split": "iid",
        },
        "batch_size": 100,
        "epochs": 1,
        "numerics": "none",
    }
    begun = time.thread_time()
    found = prepare_scenario(
        make_scenario("pipelearn", 4, workload=work, server="20gflops", speed="1gflops")
    )
    outcome = simulate(found, load(found.scenario.workload.data, blank=True))
    assert outcome.status == "finished", outcome.error
    assert time.thread_time() - begun < 5


def test_blank_data_have_the_labels_and_take_no_memory() -> None:
    spec = make_scenario(
        "pipelearn",
        workload={
            "data": {"name": "synthetic-1x8x8", "train": 50, "test": 9, "split": "iid"}
        },
    )
    full, blank = data(spec.workload.data), load(spec.workload.data, blank=True)
    assert (blank.train_labels == full.train_labels).all()
    assert blank.train_images.shape == full.train_images.shape
    part = blank.part(full.train_labels[:7], tests=True)
    assert part.train_images.shape[0] == 7
    assert part.train_images.strides[0] == 0
