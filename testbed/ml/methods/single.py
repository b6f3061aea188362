"""Training and inference on one device, the reference for every division of the work.

The program is also the shortest complete one: it shows how a method charges computations and records events.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import Field

from testbed.common.errors import InputError, nearest
from testbed.device import Device, Span
from testbed.ml.data.batches import IntervalTrigger
from testbed.ml.data.dataset import Dataset
from testbed.ml.layers import costs
from testbed.ml.layers.feed import Answers, Requests, Score, Training, loss_fields
from testbed.ml.layers.shape_shard import ShapeShard, make_shard
from testbed.ml.layers.shard import Shard, State, result_of
from testbed.ml.lazy import torch
from testbed.ml.method import (
    Method,
    Options,
    PlanningProblem,
    ProgramContext,
    StepsOrTime,
)
from testbed.ml.training.stopping import Stopping
from testbed.plan import Assignment, Plan


class SingleOptions(Options):
    """Options of `Single`."""

    device: str | None = Field(
        None, description="the device; default: the first device of the scenario"
    )
    evaluate_every: StepsOrTime | None = Field(
        None,
        description=(
            "interval between evaluations, in steps or time; default: only at the end"
        ),
    )


class Single(Method[SingleOptions]):
    """The whole model on one device. A restart of the device starts the workload again."""

    name = "single"
    summary = "one device alone; the others idle"
    tasks = ("train", "infer")
    Options = SingleOptions
    supports = frozenset(
        {
            "early_stopping",
            "initial_weights",
            "precisions",
            "smaller_batches",
            "timing_only",
        }
    )

    def plan(self, problem: PlanningProblem[SingleOptions]) -> Plan:
        """Assign all units to one device. Raises `InputError` for an unknown device or insufficient memory."""
        names = [device.name for device in problem.devices]
        chosen = problem.options.device or names[0]
        if chosen not in names:
            raise InputError(
                f"unknown device '{chosen}': {nearest(chosen, names)}",
                ("method", "device"),
            )
        device = problem.device(chosen)
        memory = costs.whole_memory(problem, device)
        costs.check_memory(device, memory)
        units = len(problem.model.units)
        whole = Assignment(device=chosen, start=0, stop=units, memory=memory)
        return Plan(
            method=self.name,
            coordinator=chosen,
            assignments=(whole,),
            step_time=costs.whole_seconds(problem, device),
        )

    async def program(
        self, device: Device, context: ProgramContext[SingleOptions]
    ) -> None:
        """Train or answer requests on the coordinator; do nothing elsewhere."""
        if device.name != context.plan.coordinator:
            return
        assert context.dataset is not None
        problem = context.problem
        shard = make_shard(problem, 0, len(problem.model.units), device.name)
        if context.weights is not None:
            shard.load(context.weights)
        stopping = Stopping(problem.training)

        def result() -> State:
            # With early stopping the best weights so far, otherwise the newest.
            return stopping.result(result_of(shard.state()))

        device.expose(result)
        if problem.workload.task == "train":
            await _train_model(device, problem, context.dataset, shard, stopping)
        else:
            await _answer_requests(device, problem, context.dataset, shard)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of the one device; the others have none."""
        if device != plan.coordinator:
            return frozenset()
        return frozenset({"forward", "backward", "update", "evaluate"})


async def _train_model(
    device: Device,
    problem: PlanningProblem[SingleOptions],
    dataset: Dataset,
    shard: Shard | ShapeShard,
    stopping: Stopping,
) -> None:
    """Train all steps, evaluating in between and at the end, unless early stopping ends the training."""
    training = Training(dataset, problem.workload, problem.seed)
    training.record_left_out(device)
    requests = Requests(dataset, problem.workload.batch_size)
    due = IntervalTrigger(problem.options.evaluate_every, device.now())
    has_numbers = problem.workload.numerics != "none"

    def weights() -> State:
        return result_of(shard.state())

    for step in range(training.steps):
        images, labels = training.batch(step)
        loss = await _train_step(device, problem, shard, step, images, labels)
        fields = loss_fields(loss, computed=has_numbers)
        device.record("step", step=step, samples=len(labels), **fields)
        done = step + 1
        if done == training.steps or due(done, device.now()):
            fields = await _evaluate(device, problem, shard, requests)
            device.record("evaluate", step=done, **fields)
            due.made(device.now())
            stopping.judge(done, fields, weights)
            if stopping.reason:
                break


async def _train_step(
    device: Device,
    problem: PlanningProblem,
    shard: Shard | ShapeShard,
    step: int,
    images: torch.Tensor,
    labels: torch.Tensor,
) -> float:
    """Take a step with one batch; return the batch's loss."""
    units = problem.model.units
    samples = len(labels)
    # A batch is one micro-batch.
    key = (step, 0)
    weight = problem.training.weight(labels)
    forward = partial(shard.forward_loss, key, images, labels, weight)
    cost = costs.forward_cost(units, samples)
    loss = await device.compute(forward, cost, Span("forward", step))
    backward = partial(shard.backward, key)
    cost = costs.backward_cost(units, samples)
    await device.compute(backward, cost, Span("backward", step))
    update = partial(shard.update, step)
    cost = costs.update_cost(units, problem.training)
    await device.compute(update, cost, Span("update", step))
    return loss


async def _evaluate(
    device: Device,
    problem: PlanningProblem,
    shard: Shard | ShapeShard,
    requests: Requests,
) -> dict[str, Any]:
    """Return the score of the test samples, as fields of an event."""
    score = Score(problem.training)
    for index in range(len(requests)):
        images = requests.images(index)
        outputs = await _infer(device, problem, shard, images, Span("evaluate", index))
        score.add(outputs, requests.labels(index))
    return score.fields()


async def _answer_requests(
    device: Device,
    problem: PlanningProblem,
    dataset: Dataset,
    shard: Shard | ShapeShard,
) -> None:
    """Answer all requests, one after the other."""
    workload = problem.workload
    requests = Requests(dataset, workload.batch_size, workload.requests)
    answers = Answers(device, problem, requests)
    for index in range(len(requests)):
        asked = device.now()
        images = requests.images(index)
        outputs = await _infer(device, problem, shard, images, Span("forward", index))
        # Scoring the outputs is no part of the request.
        latency = device.now() - asked
        device.record("request", request=index, latency=latency)
        answers.add(index, outputs)
    answers.finish()


async def _infer(
    device: Device,
    problem: PlanningProblem,
    shard: Shard | ShapeShard,
    images: torch.Tensor,
    span: Span,
) -> torch.Tensor:
    """Return the outputs of a batch, (samples, ...)."""
    work = partial(shard.infer, images)
    cost = costs.forward_cost(problem.model.units, len(images))
    return await device.compute(work, cost, span)
