"""Tests of timing-only runs: times and messages are those of runs that compute values."""

import time

import pytest

from testbed.common.errors import InputError
from testbed.ml.data import load
from testbed.scenario.loading import load as load_scenario
from testbed.simulation import simulate
from tests.helpers.server_scenarios import (
    fields_of,
    load_cached,
    make_scenario,
    prepare_scenario,
    run_simulated,
)
from tests.testbed.ml.outcomes import events_without_values

METHODS = ("federated", "split-learning", "split-federated", "pipelearn", "single")


def timing_only(spec):
    workload = spec.workload.model_copy(update={"numerics": "none"})
    return spec.model_copy(update={"workload": workload})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "model",
    [{"name": "vgg5"}, {"name": "mobilenetv2", "width": 0.1}],
    ids=lambda model: model["name"],
)
def test_timing_only_run_has_events_of_full_run(method: str, model: dict) -> None:
    faults = [
        {"kill": "device1", "at": "40s", "for": "3s"},
        {
            "partition": [["device2"], ["server", "device1"]],
            "at": "90s",
            "for": "9s",
        },
    ]
    # A single device has no others that could fail.
    if method == "single":
        faults = []
    spec = make_scenario(
        method, 2, workload={"model": model, "steps": 3}, faults=faults
    )
    full = run_simulated(spec)
    timed = run_simulated(timing_only(spec))
    assert events_without_values(timed) == events_without_values(full)
    assert timed.weights is None
    for step in fields_of(timed, "step"):
        assert "loss" not in step
    for evaluation in fields_of(timed, "evaluate"):
        assert "accuracy" not in evaluation


@pytest.mark.parametrize(
    "name",
    ["ftpipehd-faults", "gpipe-kill-for-good", "distributed-kill", "sequential-infer"],
)
def test_timing_only_smoke_scenario_has_events_of_full_run(name: str) -> None:
    spec = load_scenario(f"smoke/{name}").model_copy(update={"sweep": {}})
    full = run_simulated(spec)
    timed = run_simulated(timing_only(spec))
    assert events_without_values(timed) == events_without_values(full)
    assert timed.weights is None
    for event in timed.events:
        assert not {"loss", "accuracy"} & set(event.fields)


def test_method_in_timeslots_rejects_timing_only_run() -> None:
    # A timeslot has a fixed length, so computing no values would predict nothing.
    with pytest.raises(InputError, match="does not support timing-only runs"):
        prepare_scenario(timing_only(load_scenario("smoke/edgepipe")))


@pytest.mark.timed
def test_timing_only_epoch_of_resnet18_takes_less_than_5_seconds() -> None:
    workload = {
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
    # The time of this thread, so that other processes of the host do not count.
    started = time.thread_time()
    prepared = prepare_scenario(
        make_scenario(
            "pipelearn",
            4,
            workload=workload,
            server_speed="20gflops",
            device_speed="1gflops",
        )
    )
    outcome = simulate(prepared, load(prepared.scenario.workload.data, blank=True))
    assert outcome.status == "finished", outcome.error
    assert time.thread_time() - started < 5


def test_blank_dataset_has_labels_and_shapes_without_memory_for_values() -> None:
    digits = {"name": "synthetic-1x8x8", "train": 50, "test": 9, "split": "iid"}
    part = make_scenario("pipelearn", workload={"data": digits}).workload.data
    full = load_cached(part)
    blank = load(part, blank=True)
    assert (blank.train_labels == full.train_labels).all()
    assert blank.train_images.shape == full.train_images.shape
    share = blank.subset(full.train_labels[:7], tests=True)
    assert share.train_images.shape[0] == 7
    # A stride of 0: all samples are the same memory.
    assert share.train_images.strides[0] == 0
