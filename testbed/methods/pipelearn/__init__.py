"""PipeLearn (Zhang et al., 2022): split-federated learning with several mini-batches under way for each device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.kits.rounds.method import Hooks, SplitMethod
from testbed.kits.rounds.options import SPLIT, GroupOptions, SplitPoints
from testbed.kits.rounds.planner import Participants, RoundDetails, split_plan
from testbed.method import Problem
from testbed.methods.pipelearn import optimise
from testbed.plan import Plan


class PipeLearnOptions(GroupOptions):
    """Options of `PipeLearn`."""

    split: SplitPoints = Field("best", description=SPLIT)
    parallel: Literal["best"] | int | dict[str, int] = Field(
        "best",
        description="mini-batches of an iteration, N: one number for all devices, or `{device: N}`; best: by the stage "
        "graph",
    )
    least: int = Field(
        4,
        ge=1,
        description="samples of a mini-batch at least, where N is chosen: batch normalisation has only these",
    )
    candidates: Literal["all", "paper"] = Field(
        "all",
        description="what N is chosen from; paper: equation (14) alone; all: the largest N for each size of a "
        "mini-batch as well",
    )


class PipeLearn(SplitMethod[PipeLearnOptions]):
    """Algorithms 1 and 2 of the paper; an update is that of the whole batch.

    Batch normalisation normalises each mini-batch by itself, so that with it an iteration differs from a step with the
    whole batch. Its running statistics follow every mini-batch and are averaged as weights are. Momentum stays where it
    was made, on the device and in the server's copy for it. A batch is cut into N mini-batches of floor(B/N) samples;
    what is left of it, and of an epoch, comes up in other epochs.
    """

    name = "pipelearn"
    summary = "PipeLearn: split-federated learning with several mini-batches of each device under way"
    Options = PipeLearnOptions

    def hooks(self, options: PipeLearnOptions) -> Hooks:
        """Average the models of a fraction of the devices."""
        return Hooks(choose=options.choose, min_updates=options.min_devices)

    def plan(self, problem: Problem[PipeLearnOptions]) -> Plan[RoundDetails]:
        """Choose P and N for each device. Raises `InputError` where that cannot be."""
        team, options = Participants(problem), problem.options
        return split_plan(
            self.name,
            team,
            options.split,
            concurrent_clients=len(team.devices),
            parallel=options.parallel,
            choices=optimise.choices(options.least, options.candidates == "paper"),
        )
