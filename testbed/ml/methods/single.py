"""Training and inference on one device, the reference for all methods that distribute the work.

As the shortest complete program, it also shows how a method charges computations to a device and records events.
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
        device_name = problem.options.device or names[0]
        if device_name not in names:
            raise InputError(
                f"unknown device '{device_name}': {nearest(device_name, names)}",
                ("method", "device"),
            )
        device = problem.device(device_name)
        memory = costs.whole_memory(problem, device)
        costs.check_memory(device, memory)
        units = len(problem.model.units)
        whole_model = Assignment(device=device_name, start=0, stop=units, memory=memory)
        return Plan(
            method=self.name,
            coordinator=device_name,
            assignments=(whole_model,),
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

        def final_weights() -> State:
            # With early stopping these are the best weights so far, otherwise the newest ones.
            return stopping.result(result_of(shard.state()))

        # The runtime reads the weights of the run by this function.
        device.expose(final_weights)
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
    """Train with evaluations in between and at the end; early stopping may end the training before the last step."""
    training = Training(dataset, problem.workload, problem.seed)
    training.record_left_out(device)
    requests = Requests(dataset, problem.workload.batch_size)
    interval = problem.options.evaluate_every
    evaluation_trigger = IntervalTrigger(interval, device.now())
    is_computed = problem.workload.is_computed

    def newest_weights() -> State:
        return result_of(shard.state())

    for step in range(training.steps):
        images, labels = training.batch(step)
        loss = await _train_step(device, problem, shard, step, images, labels)
        fields = loss_fields(loss, computed=is_computed)
        device.record("step", step=step, samples=len(labels), **fields)
        done = step + 1
        is_last = done == training.steps
        if is_last or evaluation_trigger.is_due(done, device.now()):
            scores = await _evaluate(device, problem, shard, requests)
            device.record("evaluate", step=done, **scores)
            evaluation_trigger.restart(device.now())
            stopping.judge(done, scores, newest_weights)
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
    # The key of activations on a shard, (step, micro-batch): the batch is a single micro-batch.
    key = (step, 0)
    weight = problem.training.weight(labels)
    forward = partial(shard.forward_loss, key, images, labels, weight)
    forward_cost = costs.forward_cost(units, samples)
    loss = await device.compute(forward, forward_cost, Span("forward", step))
    backward = partial(shard.backward, key)
    backward_cost = costs.backward_cost(units, samples)
    await device.compute(backward, backward_cost, Span("backward", step))
    update = partial(shard.update, step)
    update_cost = costs.update_cost(units, problem.training)
    await device.compute(update, update_cost, Span("update", step))
    return loss


async def _evaluate(
    device: Device,
    problem: PlanningProblem,
    shard: Shard | ShapeShard,
    requests: Requests,
) -> dict[str, Any]:
    """Return the loss and the metrics of all test samples, as fields of an event."""
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
        start = device.now()
        images = requests.images(index)
        outputs = await _infer(device, problem, shard, images, Span("forward", index))
        # The latency ends before `answers` compares the outputs with the labels.
        latency = device.now() - start
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
    forward = partial(shard.infer, images)
    cost = costs.forward_cost(problem.model.units, len(images))
    return await device.compute(forward, cost, span)
