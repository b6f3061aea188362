"""Tests of weight versions in asynchronous 1F1B: versions used, stored and aggregated."""

import pytest
import torch

from testbed.ml.layers.versions import mean
from testbed.ml.schedule import Action, actions_by_stage, one_forward_one_backward
from testbed.ml.schedule.versions import (
    is_aggregation_due,
    max_in_flight,
    max_versions,
    version_used,
)


class StageVersions:
    """The versions of one stage, updated by the stage's actions; `apply` asserts the presence of needed versions."""

    def __init__(self, stages: int, stage: int, vertical_sync: bool) -> None:
        self.stages = stages
        # With vertical sync the first stage decides which version a batch uses.
        self.deciding_stage = 0 if vertical_sync else stage
        self.vertical_sync = vertical_sync
        self.in_flight: dict[int, int] = {}
        self.stored = {0}
        self.updates = 0
        self.forwards = 0

    def used_by(self, batch: int) -> int:
        return version_used(batch, self.stages, self.deciding_stage)

    def apply(self, action: Action) -> None:
        if action.kind == "forward":
            version = self.used_by(action.micro)
            assert version <= self.updates
            assert version in self.stored
            if not self.vertical_sync:
                assert version == self.updates
            self.in_flight[action.micro] = version
            self.forwards += 1
        else:
            assert self.in_flight.pop(action.micro) in self.stored
            self.updates += 1
            self.stored.add(self.updates)
        # Versions before the one of the oldest batch are dropped; the asserts above show that none is needed again.
        oldest = self.used_by(min(self.updates, self.forwards))
        self.stored &= set(range(oldest, self.updates + 1))
        assert self.updates in self.stored


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("vertical_sync", [True, False])
def test_stored_versions_suffice_and_are_bounded_under_1f1b(
    stages: int, vertical_sync: bool
) -> None:
    batches = 5 * stages
    schedule = actions_by_stage(one_forward_one_backward, stages, batches)
    for stage, actions in enumerate(schedule):
        versions = StageVersions(stages, stage, vertical_sync)
        most_in_flight = 0
        most_stored = 0
        for action in actions:
            versions.apply(action)
            different = set(versions.in_flight.values())
            most_in_flight = max(most_in_flight, len(different))
            most_stored = max(most_stored, len(versions.stored))
        assert most_in_flight == stages - stage
        assert max_in_flight(stages, stage) == stages - stage
        assert most_stored == max_versions(stages, stage, vertical_sync=vertical_sync)


def aggregations(trainings: int, multiple: int = 1) -> list[int]:
    """Return the numbers of batches, below 9, after which a stage aggregates."""
    due = []
    for done in range(9):
        if is_aggregation_due(done, trainings, multiple):
            due.append(done)
    return due


def test_versions_used_match_figure_2_of_ftpipehd() -> None:
    # Three stages: batches 0 to 2 use version 0, and batches 3 to 5 versions 1 to 3.
    assert [version_used(batch, 3) for batch in range(6)] == [0, 0, 0, 1, 2, 3]
    # The figure counts an aggregation as a version: batch 6 has version 4 here and 5 there.
    used = version_used(6, 3)
    aggregations_before = [done for done in aggregations(3) if done <= used]
    assert used + len(aggregations_before) == 5


def test_aggregation_interval_is_multiple_of_concurrent_trainings() -> None:
    # Of three stages the first trains three batches at once, the second two, and the last one.
    assert aggregations(max_in_flight(3, 0)) == [3, 6]
    assert aggregations(max_in_flight(3, 1), multiple=2) == [4, 8]
    # A single training has no versions to aggregate.
    assert aggregations(max_in_flight(3, 2)) == []
    assert aggregations(3, multiple=0) == []


def test_mean_of_versions_averages_weights_of_equal_names() -> None:
    versions = [{"0.weight": torch.tensor([float(value), 1.0])} for value in (1, 2, 6)]
    assert torch.equal(mean(versions)["0.weight"], torch.tensor([3.0, 1.0]))
    with pytest.raises(ValueError, match="must have the same units"):
        mean([versions[0], {"1.weight": torch.zeros(2)}])
