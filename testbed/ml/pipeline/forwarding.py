"""Batches that the coordinator sends forward through the stages, without training: inference requests, evaluations."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from testbed.messaging.supervision import Lost, Supervisor
from testbed.ml.layers.feed import Answers, Requests, Score
from testbed.ml.lazy import torch
from testbed.ml.method import ProgramContext
from testbed.ml.pipeline.messages import Activation, Output, Purpose
from testbed.ml.training.config import TrainingConfig


async def forward_all(
    supervisor: Supervisor,
    work: Purpose,
    batches: Iterable[int],
    window: int,
    images: Callable[[int], torch.Tensor],
) -> AsyncIterator[tuple[int, torch.Tensor]]:
    """Send batches through the stages, at most ``window`` at once; yield the index and the outputs of each batch.

    ``images`` returns the inputs of a batch, (samples, channels, height, width), and is called when the batch is sent.
    Outputs are (samples, ...). Raises `Lost` when outputs can no longer arrive.
    """
    mailbox = supervisor.mailbox
    waiting = deque(batches)
    in_flight: set[int] = set()
    while waiting or in_flight:
        while waiting and len(in_flight) < window:
            index = waiting.popleft()
            in_flight.add(index)
            inputs = images(index)
            # A batch passes as a single micro-batch.
            activation = Activation(
                configuration=mailbox.configuration,
                work=work,
                batch=index,
                micro=0,
                micros=1,
                samples=len(inputs),
                tensor=inputs,
            )
            first_stage = supervisor.layout[0].device
            mailbox.post(first_stage, activation)
        output = await supervisor.take(Output)
        in_flight.remove(output.batch)
        supervisor.progress += 1
        yield output.batch, output.tensor


async def evaluate(
    supervisor: Supervisor, step: int, tests: Requests, training: TrainingConfig
) -> dict[str, Any]:
    """Send the test samples through the stages; record and return the score by field name."""
    score = Score(training)
    # Keeps all stages busy: a batch in each stage, and one on the way to each.
    window = 2 * len(supervisor.layout)
    async for index, output in forward_all(
        supervisor, "evaluate", range(len(tests)), window, tests.images
    ):
        score.add(output, tests.labels(index))
    fields = score.fields()
    supervisor.device.record("evaluate", step=step, **fields)
    return fields


class Serving:
    """Answers every request once, despite failures; a `testbed.messaging.supervision.ResumableWork`."""

    def __init__(
        self,
        supervisor: Supervisor,
        context: ProgramContext,
        in_flight: int,
        *,
        gives_up: bool = False,
    ) -> None:
        """``in_flight`` is the maximum number of requests sent but not answered.

        ``gives_up``: requests in flight when a device is lost fail instead of being sent again.
        """
        assert context.dataset is not None
        workload = context.problem.workload
        self._device = supervisor.device
        self._supervisor = supervisor
        self._in_flight = in_flight
        self._gives_up = gives_up
        self._requests = Requests(
            context.dataset, workload.batch_size, workload.requests
        )
        self._sent_at: dict[int, float] = {}
        """Request -> time at which it was first sent, in seconds, from which the latency counts."""
        self._unanswered = list(range(len(self._requests)))
        self._answers = Answers(self._device, context.problem, self._requests)

    @property
    def start(self) -> int:
        """The first unanswered request; the number of requests if all are answered."""
        if not self._unanswered:
            return len(self._requests)
        return self._unanswered[0]

    async def run(self) -> None:
        """Send all unanswered requests."""
        outputs = forward_all(
            self._supervisor,
            "infer",
            # A copy, since the loop removes answered requests from the list.
            list(self._unanswered),
            self._in_flight,
            self._request_images,
        )
        try:
            async for index, output in outputs:
                self._unanswered.remove(index)
                latency = self._device.now() - self._sent_at[index]
                self._device.record("request", request=index, latency=latency)
                self._answers.add(index, output)
        except Lost as lost:
            if self._gives_up:
                self._fail_requests(lost)
            raise
        self._answers.finish()

    def _fail_requests(self, lost: Lost) -> None:
        """Record requests in flight during a loss as failed, so that they are not sent again after the recovery."""
        in_flight = [index for index in self._unanswered if index in self._sent_at]
        for index in in_flight:
            self._unanswered.remove(index)
            error = f"{lost} was lost during the inference: use method.on_loss replan to have such requests repeated"
            waited = self._device.now() - self._sent_at[index]
            self._device.record("failed", request=index, error=error, after=waited)

    def _request_images(self, index: int) -> torch.Tensor:
        self._sent_at.setdefault(index, self._device.now())
        return self._requests.images(index)
