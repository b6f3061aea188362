"""PipeLearn (Zhang et al., 2022): split-federated learning with several mini-batches under way for each device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.device import Device
from testbed.kits.rounds import planner
from testbed.kits.rounds.figures import DECLARED
from testbed.kits.rounds.options import SPLIT, GroupOptions, SplitPoints
from testbed.kits.rounds.planner import CollaborativeDetails, Team
from testbed.kits.rounds.programs import Style, run
from testbed.method import Job, Method, Problem
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


class PipeLearn(Method[PipeLearnOptions, CollaborativeDetails]):
    """Algorithms 1 and 2 of the paper; an update is that of the whole batch.

    Batch normalisation normalises each mini-batch by itself, so that with it an iteration differs from a step with the
    whole batch. Its running statistics follow every mini-batch and are averaged as weights are. Momentum stays where it
    was made, on the device and in the server's copy for it. A batch is cut into N mini-batches of floor(B/N) samples;
    what is left of it, and of an epoch, comes up in other epochs.
    """

    name = "pipelearn"
    summary = "PipeLearn: split-federated learning with several mini-batches of each device under way"
    Options = PipeLearnOptions
    Details = CollaborativeDetails
    declared = DECLARED
    timing_only = True
    takes_weights = True

    def data_owners(self, problem: Problem[PipeLearnOptions]) -> tuple[str, ...]:
        """Return all devices but the first, which is the server."""
        return Team(problem).names

    def plan(self, problem: Problem[PipeLearnOptions]) -> Plan[CollaborativeDetails]:
        """Choose P and N for each device. Raises `InputError` where that cannot be."""
        team, options = Team(problem), problem.options
        team.check()
        return planner.split_plan(
            self.name,
            team,
            options.split,
            at_once=len(team.devices),
            parallel=options.parallel,
            search=planner.Search(options.least, options.candidates == "paper"),
        )

    async def program(self, device: Device, job: Job[PipeLearnOptions, CollaborativeDetails]) -> None:
        """Hold rounds on the first device, train on the others."""
        options = job.problem.options
        await run(device, job, Style(split=True, fraction=options.fraction, min_devices=options.min_devices))
