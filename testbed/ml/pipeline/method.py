"""Base classes of pipeline training methods.

A synchronous method overrides the options of `SynchronousMethod`, such as the default schedule. An asynchronous method
derives from `AsynchronousMethod` with its options and the `Partitioner` that chooses its partitions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, TypeVar

from testbed.device import Device
from testbed.ml.method import Method, PlannedMessage, PlanningProblem, ProgramContext
from testbed.ml.partition.asynchronous import divisible_limit
from testbed.ml.pipeline.metrics import DECLARED
from testbed.ml.pipeline.planning import (
    AsynchronousDetails,
    AsynchronousOptions,
    Partitioner,
    PipelineDetails,
    SynchronousOptions,
    devices_among,
    initial_devices,
    momentum_advice,
    pipeline_at_scenario_speeds,
    replica_messages,
    stage_assignments,
    stage_messages,
    synchronous_cut,
)
from testbed.ml.schedule import SCHEDULES, Action, asynchronous_1f1b, draw_grid
from testbed.network.link import Link
from testbed.plan import Assignment, Plan

SpecificOptions = TypeVar("SpecificOptions", bound=AsynchronousOptions)


class SynchronousMethod(Method[SynchronousOptions, PipelineDetails]):
    """A pipeline with one update a step, by the gradient of the whole batch, and with recovery from checkpoints."""

    tasks = ("train",)
    Options = SynchronousOptions
    supports = frozenset(
        {
            "all_links",
            "early_stopping",
            "initial_weights",
            "precisions",
            "smaller_batches",
            "tied_weights",
            "timing_only",
        }
    )
    Details = PipelineDetails
    span_names = frozenset(
        {"load", "forward", "backward", "update", "checkpoint", "evaluate"}
    )

    def plan(
        self, problem: PlanningProblem[SynchronousOptions]
    ) -> Plan[PipelineDetails]:
        """Divide the model among the devices. Raises `InputError` if no cuts fit."""
        options = problem.options
        pipeline, cuts = synchronous_cut(problem, initial_devices(problem))
        return Plan(
            method=self.name,
            coordinator=problem.devices[0].name,
            assignments=stage_assignments(pipeline, cuts),
            step_time=pipeline.step_time(cuts),
            details=PipelineDetails(
                schedule=options.schedule,
                micro_batches=options.micro_batches,
                partition=options.partition,
                bottleneck=pipeline.bottleneck(cuts),
            ),
        )

    def largest_messages(
        self, problem: PlanningProblem[SynchronousOptions], plan: Plan[PipelineDetails]
    ) -> Iterator[PlannedMessage]:
        """Return activations, gathered units and initial weights as messages."""
        return stage_messages(problem, plan)

    def samples_at_once(self, problem: PlanningProblem[SynchronousOptions]) -> int:
        """Return the size of the smallest micro-batch."""
        return max(1, problem.workload.batch_size // problem.options.micro_batches)

    async def program(
        self,
        device: Device,
        context: ProgramContext[SynchronousOptions, PipelineDetails],
    ) -> None:
        """Coordinate the training from the first device; run a stage on every device."""
        from testbed.ml.pipeline.program import run_synchronous

        def assign_stages(present: Collection[str]) -> tuple[Assignment, ...]:
            devices = devices_among(context.problem, present)
            pipeline, cuts = synchronous_cut(context.problem, devices)
            return stage_assignments(pipeline, cuts)

        schedule = SCHEDULES[context.problem.options.schedule]
        await run_synchronous(device, context, schedule, assign_stages)

    def draw(self, plan: Plan[PipelineDetails]) -> str | None:
        """Draw a step as a grid with one row per stage and one column per action; None for a single stage."""
        stages = len(plan.assignments)
        if stages < 2:
            return None
        schedule = SCHEDULES[plan.details.schedule]
        return draw_grid(schedule, stages, plan.details.micro_batches)


class AsynchronousMethod(Method[SpecificOptions, AsynchronousDetails]):
    """A pipeline with asynchronous 1F1B, weight stashing, vertical sync, and recovery from replicas of the weights."""

    tasks = ("train",)
    supports = frozenset(
        {
            "all_links",
            "early_stopping",
            "initial_weights",
            "precisions",
            "smaller_batches",
            "timing_only",
        }
    )
    refuses: ClassVar[Mapping[str, str]] = {
        "clip.norm": "each update would wait for all stages, which value does not"
    }
    Details = AsynchronousDetails
    span_names = frozenset(
        {
            "profile",
            "load",
            "forward",
            "backward",
            "update",
            "replicate",
            "keep",
            "evaluate",
        }
    )
    declared = DECLARED
    Partitioner: ClassVar[type[Partitioner[Any]]]
    """Class of the object that chooses the partitions."""

    def plan(
        self, problem: PlanningProblem[SpecificOptions]
    ) -> Plan[AsynchronousDetails]:
        """Divide the model among the devices by the method's partitioner.

        Raises `InputError` for too many stages, missing links or insufficient memory.
        """
        partitioner = self.Partitioner(problem)
        partition = partitioner.initial()
        cuts = partition.cuts
        # The prediction uses the actual speeds, which the partitioner may not know before it measures them.
        actual = pipeline_at_scenario_speeds(problem, partition.devices)
        # A default `Link` has no rate limit and no delay, so it takes no time.
        instant_links = dict.fromkeys(actual.links, Link())
        without_links = replace(actual, links=instant_links)
        best_cuts = actual.least_bottleneck()
        best_cuts_without_links = without_links.least_bottleneck()
        stage_times = []
        for stage, (first, last) in enumerate(pairwise(cuts)):
            stage_times.append(actual.stage_time(stage, first, last))
        speeds = [1 / capacity for capacity in actual.capacities]
        return Plan(
            method=self.name,
            coordinator=problem.devices[0].name,
            assignments=partitioner.assignments(partition),
            step_time=actual.batch_time(cuts),
            details=AsynchronousDetails(
                in_flight=problem.options.window(len(partition.devices)),
                bottleneck=actual.bottleneck(cuts),
                slowest_stage=actual.slowest_stage(cuts),
                least_bottleneck=actual.bottleneck(best_cuts),
                least_slowest_stage=without_links.bottleneck(best_cuts_without_links),
                divisible_limit=divisible_limit(speeds),
                stage_times=tuple(stage_times),
            ),
        )

    async def program(
        self,
        device: Device,
        context: ProgramContext[SpecificOptions, AsynchronousDetails],
    ) -> None:
        """Coordinate from the first device; run a stage and keep replicas on every device."""
        from testbed.ml.pipeline.program import run_asynchronous

        await run_asynchronous(device, context, self.Partitioner(context.problem))

    def largest_messages(
        self, problem: PlanningProblem[SpecificOptions], plan: Plan[AsynchronousDetails]
    ) -> Iterator[PlannedMessage]:
        """Return activations, initial weights and replicas as messages."""
        yield from stage_messages(problem, plan, by_unit=True)
        yield from replica_messages(problem, plan)

    def advice(
        self, problem: PlanningProblem[SpecificOptions], plan: Plan[AsynchronousDetails]
    ) -> tuple[str, ...]:
        """Return a warning about momentum with gradients several batches old."""
        return momentum_advice(problem, plan.details.in_flight)

    def draw(self, plan: Plan[AsynchronousDetails]) -> str | None:
        """Draw the first batches as a grid with one row per stage and one column per action, without updates.

        Returns None for a single stage.
        """
        stages = len(plan.assignments)
        if stages < 2:
            return None

        def schedule(stages: int, stage: int, batches: int) -> Iterator[Action]:
            return asynchronous_1f1b(stages, stage, batches, plan.details.in_flight)

        # Enough batches to show how the pipeline fills and drains.
        return draw_grid(schedule, stages, 2 * stages)
