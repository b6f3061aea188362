"""Former names of scenario keys."""

import pytest

from testbed.common.errors import InputError
from testbed.methods import METHODS
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load


def test_former_key_is_refused_with_its_present_name():
    changes = ["workload.method.patience=1s"]
    (trial,) = trials(load("quickstart", changes))
    with pytest.raises(InputError, match="has been renamed: write 'stall_timeout'"):
        prepare(trial)


FTPIPEHD = {
    "aggregate": "aggregation_interval",
    "chain_every": "chain_replication_interval",
    "copies": "replicas",
    "fetch": "redistribution",
    "global_every": "global_replication_interval",
    "least_gain": "min_improvement",
    "objective": "partition_objective",
    "return_window": "rejoin_timeout",
    "selection": "join_timeout",
}
PIPELEARN = {
    "candidates": "parallel_batch_candidates",
    "least": "min_mini_batch_size",
    "parallel": "parallel_batches",
    "split": "split_point",
}
DISTRIBUTED = {
    "early": "tiled_layers",
    "fused": "fused_pairs",
    "grid": "tile_grid",
    "least_chunk": "min_chunk_bytes",
    "overlap": "tile_overlap",
    "reuse": "communication_formula",
    "stealing": "tile_stealing",
}


@pytest.mark.parametrize(
    ("scenario", "renamed"),
    [
        ("papers/ftpipehd-figure-6", FTPIPEHD),
        ("papers/pipelearn-speeds", PIPELEARN),
        ("papers/stahl-table-1", DISTRIBUTED),
    ],
)
def test_former_keys_of_published_methods_name_the_present_ones(
    scenario: str, renamed: dict[str, str]
) -> None:
    for former, present in renamed.items():
        changes = ["sweep={}", "points=[]", f"workload.method.{former}=1"]
        (trial,) = trials(load(scenario, changes))
        with pytest.raises(InputError, match=f"renamed: write '{present}'"):
            prepare(trial)


@pytest.mark.parametrize(
    ("former", "present"), [("outage", "outage_time"), ("rest", "remaining_time")]
)
def test_former_metrics_of_expectations_name_the_present_ones(
    former: str, present: str
) -> None:
    changes = ["sweep={}", "points=[]", f"expect.{former}=> 0"]
    (trial,) = trials(load("papers/ftpipehd-figure-6", changes))
    with pytest.raises(InputError, match=f"renamed: write '{present}'"):
        prepare(trial)


@pytest.mark.parametrize(
    ("method", "former", "present"),
    [
        ("edgepipe", "learned", "update_share"),
        ("versatile", "accuracy_risen", "accuracy_gain"),
    ],
)
def test_former_metric_of_one_method_is_refused_with_its_present_name(
    method, former, present
):
    (trial,) = trials(load(f"smoke/{method}", [f"expect.{former}=> 0"]))
    with pytest.raises(InputError, match=f"renamed: write '{present}'"):
        prepare(trial)


@pytest.mark.parametrize(
    ("method", "former", "present"),
    [
        (name, former, present)
        for name in ("edgepipe", "versatile")
        for former, present in METHODS[name].Options.former_keys.items()
    ],
)
def test_former_key_of_one_method_is_refused_with_its_present_name(
    method, former, present
):
    assert present in METHODS[method].Options.model_fields
    (trial,) = trials(load(f"smoke/{method}", [f"workload.method.{former}=1"]))
    expected = (
        f"workload.method.{former}: '{former}' has been renamed: write '{present}'"
    )
    with pytest.raises(InputError, match=expected):
        prepare(trial)
