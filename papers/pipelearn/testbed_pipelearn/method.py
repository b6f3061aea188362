"""PipeLearn (Zhang et al., 2022): split-federated learning with several mini-batches of each device in flight.

A device computes the first P layers of its model, and the server the others; batches of B samples are cut into N
mini-batches. Equations, algorithms and phases are those of the paper, as are its symbols: split point P, parallel batch
number N, batch size B, and number of layers Q. Rounds, the split model and the averaging are the testbed's; this module
adds the choice of P and N for each device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import ClassVar, Literal

from pydantic import Field

from testbed.ml.method import PlanningProblem
from testbed.ml.models.chain import Unit
from testbed.ml.rounds.estimate import Choice, PairProfile
from testbed.ml.rounds.method import Hooks, SplitMethod
from testbed.ml.rounds.options import SPLIT_HELP, GroupOptions, SplitPoints
from testbed.ml.rounds.planner import Choices, Participants, RoundDetails, split_plan
from testbed.plan import Plan

Candidates = Literal["equation-14", "all-sizes"]
"""Values of the option `parallel_batch_candidates`."""


class PipeLearnOptions(GroupOptions):
    """Options of PipeLearn; the defaults are Phase 3 of the paper as printed."""

    former_keys: ClassVar[Mapping[str, str]] = {
        "candidates": "parallel_batch_candidates",
        "least": "min_mini_batch_size",
        "parallel": "parallel_batches",
        "split": "split_point",
    }
    split_point: SplitPoints = Field("best", description=SPLIT_HELP)
    parallel_batches: Literal["best"] | int | dict[str, int] = Field(
        "best",
        description="parallel batch number N, the mini-batches of an iteration that are in flight at once: one number "
        "for all devices, or `{device: N}`; best: the shortest epoch by the stage graph",
    )
    min_mini_batch_size: int = Field(
        1,
        ge=1,
        description=(
            "minimum number of samples of a mini-batch, if N is chosen by the planner; "
            "with batch normalisation at least 2. 1: no limit, as in the paper"
        ),
    )
    parallel_batch_candidates: Candidates = Field(
        "equation-14",
        description="values of N to choose from. equation-14: one for each split point, by the paper's equation (14); "
        "all-sizes: the largest N for each size of a mini-batch as well",
    )


def parallel_batches(profile: PairProfile, split_point: int, batch_size: int) -> int:
    """Return N for a split point by equation (14), at most the number of samples of the batch.

    The mini-batches after the first one fill the time in which a device would otherwise wait between the forward pass
    and the backward pass of a mini-batch.
    """
    # Seconds of each part of an iteration, for a whole batch.
    durations = profile.durations(split_point, batch_size)
    # The server's sums run over its own layers, P+1..Q; the equation as printed has 1..P for the forward.
    idle_time = (
        durations["upload"]
        + durations["server forward"]
        + durations["server backward"]
        + durations["download"]
    )
    # In the paper a transfer takes size over rate; messages over our links are delayed as well.
    idle_time += profile.up.delay + profile.down.delay
    # Passes of other mini-batches fill the time. N must suffice also if all of them are of the shorter kind.
    shorter_pass = min(durations["forward"], durations["backward"])
    if shorter_pass == 0:
        # Any number of passes takes no time, so the limit is a mini-batch of one sample.
        return batch_size
    return min(1 + math.ceil(idle_time / shorter_pass), batch_size)


def paper_choices(
    profile: PairProfile, batch_size: int, min_size: int = 1
) -> tuple[Choice, ...]:
    """Return the paper's candidates: for each split point P = 1..Q the N of equation (14).

    ``min_size`` is the minimum number of samples of a mini-batch; the paper has no such limit.
    """
    # A batch smaller than the minimum size is a single mini-batch.
    max_count = max(1, batch_size // min_size)
    choices = []
    for split_point in range(1, profile.depth + 1):
        count = parallel_batches(profile, split_point, batch_size)
        choices.append(Choice(split_point, min(max_count, count)))
    return tuple(choices)


def all_choices(
    profile: PairProfile, batch_size: int, min_size: int = 1
) -> tuple[Choice, ...]:
    """Return the paper's candidates, and at each split point the largest N for each size of a mini-batch.

    The N of equation (14) suffices to keep the device busy. If a link is the bottleneck of the pipeline, a larger N
    still shortens the time before the link is busy and after its last transfer.
    """
    choices = list(paper_choices(profile, batch_size, min_size))
    smallest = max(1, min(min_size, batch_size))
    sizes = range(smallest, batch_size + 1)
    # For each size of a mini-batch the largest number that a batch has: fewer would fill the pipeline less.
    counts = sorted({batch_size // size for size in sizes})
    for split_point in range(1, profile.depth + 1):
        for count in counts:
            choices.append(Choice(split_point, count))
    # Without repeated choices, and in order: ties of the estimate go to the first choice, which is the paper's.
    return tuple(dict.fromkeys(choices))


def fewest_trainable_samples(units: Sequence[Unit]) -> int:
    """Return the minimum number of samples of a mini-batch with which the units can train.

    This is 1, or 2 with batch normalisation, since a single value for each channel has no deviation.

    >>> from testbed.ml.models import create
    >>> perceptron = create("mlp", {"hidden": [8]}, (1, 8, 8), 10)
    >>> resnet = create("resnet18", {}, (3, 32, 32), 10)
    >>> fewest_trainable_samples(perceptron.units), fewest_trainable_samples(resnet.units)
    (1, 2)
    """
    for unit in units:
        if unit.cost.of(["normalisation"]).accessed > 0:
            return 2
    return 1


@cache
def make_choices(min_size: int, candidates: Candidates) -> Choices:
    """Return the function listing the candidates for P and N of a device.

    Equal arguments give the same function, because the planner caches the choice of similar devices by this function.
    """
    list_choices = paper_choices if candidates == "equation-14" else all_choices
    return partial(list_choices, min_size=min_size)


class PipeLearn(SplitMethod[PipeLearnOptions]):
    """Split-federated learning by Algorithms 1 and 2 of the paper; an update has the gradient of the whole batch.

    Batch normalisation normalises each mini-batch by itself, so an iteration differs from a step with the whole batch
    in networks with such layers. Running statistics follow every mini-batch and are averaged like weights. Momentum
    stays on the device, and in the server's copy of the device's model. A batch is cut into N mini-batches of
    floor(B/N) samples; the remaining samples belong to the next batch. Without ``drop_last`` the last iteration of an
    epoch has the remaining samples of the epoch.
    """

    name = "pipelearn"
    summary = "PipeLearn: split-federated learning with several mini-batches of each device in flight"
    Options = PipeLearnOptions

    def hooks(self, options: PipeLearnOptions) -> Hooks:
        """Return the hooks averaging the models of a fraction of the devices."""
        return Hooks(choose=options.choose, min_updates=options.min_devices)

    def plan(self, problem: PlanningProblem[PipeLearnOptions]) -> Plan[RoundDetails]:
        """Choose P and N for each device; raises `InputError` if no choice fits the devices' memory."""
        team = Participants(problem)
        options = problem.options
        # Torch refuses to train batch normalisation with a single value for each channel.
        trainable = fewest_trainable_samples(problem.model.units)
        min_size = max(options.min_mini_batch_size, trainable)
        return split_plan(
            self.name,
            team,
            options.split_point,
            # Algorithm 2: the server has a model for each device, and trains all of them at once.
            concurrent_clients=len(team.devices),
            parallel_batches=options.parallel_batches,
            choices=make_choices(min_size, options.parallel_batch_candidates),
        )
