"""Training and inference on one device, the reference for every division of the work."""

from __future__ import annotations

from functools import partial

from pydantic import Field

from testbed.common.errors import InputError, nearest
from testbed.device import Device, Span
from testbed.ml.data.batches import IntervalTrigger
from testbed.ml.data.dataset import Dataset
from testbed.ml.layers import costs
from testbed.ml.layers.feed import Answers, Requests, Score, Training, loss_fields
from testbed.ml.layers.shape_shard import ShapeShard
from testbed.ml.layers.shape_shard import shard as make
from testbed.ml.layers.shard import Shard, result_of
from testbed.ml.lazy import torch
from testbed.ml.method import Job, Method, Options, Problem, StepsOrTime
from testbed.ml.training.stopping import Stopping
from testbed.plan import Piece, Plan


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

    def plan(self, problem: Problem[SingleOptions]) -> Plan:
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
        return Plan(
            method=self.name,
            lead=chosen,
            pieces=(
                Piece(
                    device=chosen, first=0, last=len(problem.model.units), memory=memory
                ),
            ),
            step_time=costs.whole_seconds(problem, device),
        )

    async def program(self, device: Device, job: Job[SingleOptions]) -> None:
        """Train or answer requests on the coordinator; do nothing elsewhere."""
        if device.name != job.plan.lead:
            return
        assert job.dataset is not None
        problem = job.problem
        shard = make(problem, 0, len(problem.model.units), device.name)
        if job.weights is not None:
            shard.load(job.weights)
        stopping = Stopping(problem.training)
        device.expose(lambda: stopping.result(result_of(shard.state())))
        if problem.workload.task == "train":
            await _train_model(device, problem, job.dataset, shard, stopping)
        else:
            await _answer_requests(device, problem, job.dataset, shard)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return the spans of the one device; the others have none."""
        return frozenset(
            {"forward", "backward", "update", "evaluate"} if device == plan.lead else ()
        )


async def _train_model(
    device: Device,
    problem: Problem[SingleOptions],
    dataset: Dataset,
    shard: Shard | ShapeShard,
    stopping: Stopping,
) -> None:
    units = problem.model.units
    training = Training(dataset, problem.workload, problem.seed)
    training.record_left_out(device)
    requests = Requests(dataset, problem.workload.batch_size)
    due = IntervalTrigger(problem.options.evaluate_every, device.now())
    for step in range(training.steps):
        images, labels = training.batch(step)
        samples = len(labels)
        forward = partial(
            shard.forward_loss,
            (step, 0),
            images,
            labels,
            problem.training.weight(labels),
        )
        backward = partial(shard.backward, (step, 0))
        loss = await device.compute(
            forward, costs.forward(units, samples), Span("forward", step)
        )
        await device.compute(
            backward, costs.backward(units, samples), Span("backward", step)
        )
        update = partial(shard.update, step)
        await device.compute(
            update, costs.update(units, problem.training), Span("update", step)
        )
        device.record(
            "step",
            step=step,
            samples=samples,
            **loss_fields(loss, problem.workload.numerics != "none"),
        )
        done = step + 1
        if done == training.steps or due(done, device.now()):
            score = Score(problem.training)
            for index in range(len(requests)):
                score.add(
                    await _answer_request(
                        device, problem, shard, requests, index, "evaluate"
                    ),
                    requests.labels(index),
                )
            device.record("evaluate", step=done, **score.fields())
            due.made(device.now())
            stopping.judge(done, score.fields(), lambda: result_of(shard.state()))
            if stopping.reason:
                break


async def _answer_requests(
    device: Device, problem: Problem, dataset: Dataset, shard: Shard | ShapeShard
) -> None:
    requests = Requests(dataset, problem.workload.batch_size, problem.workload.requests)
    answers = Answers(device, problem, requests)
    for index in range(len(requests)):
        asked = device.now()
        output = await _answer_request(
            device, problem, shard, requests, index, "forward"
        )
        device.record("request", request=index, latency=device.now() - asked)
        answers.add(index, output)
    answers.finish()


async def _answer_request(
    device: Device,
    problem: Problem,
    shard: Shard | ShapeShard,
    requests: Requests,
    index: int,
    span: str,
) -> torch.Tensor:
    images = requests.images(index)
    cost = costs.forward(problem.model.units, len(images))
    return await device.compute(lambda: shard.infer(images), cost, Span(span, index))
