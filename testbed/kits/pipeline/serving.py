"""What the coordinator of an inference does: send requests, take in outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.kits.layers.answers import Answers
from testbed.kits.layers.feed import Requests
from testbed.kits.messaging.supervision import Lost, Supervisor
from testbed.kits.pipeline.forwarding import forward_all
from testbed.method import Job

if TYPE_CHECKING:
    import torch


class Serving:
    """A `testbed.kits.messaging.recovery.ResumableWork`: every request is answered once, whatever fails."""

    def __init__(self, supervisor: Supervisor, job: Job, in_flight: int, gives_up: bool = False) -> None:
        """``gives_up``: requests that are under way when a device is lost fail, instead of being sent again."""
        assert job.dataset is not None
        workload = job.problem.workload
        self._device = supervisor.device
        self._supervisor = supervisor
        self._in_flight = in_flight
        self._gives_up = gives_up
        self._requests = Requests(job.dataset, workload.batch_size, workload.requests)
        self._asked: dict[int, float] = {}
        self._left = dict.fromkeys(range(len(self._requests)))
        self._answers = Answers(self._device, job.problem.model, self._requests)

    @property
    def start(self) -> int:
        """The first request that is not answered yet."""
        return next(iter(self._left), len(self._requests))

    async def run(self) -> None:
        """Send what is not answered yet."""
        outputs = forward_all(self._supervisor, "infer", list(self._left), self._in_flight, self._ask)
        try:
            async for index, output in outputs:
                del self._left[index]
                self._device.record("request", request=index, latency=self._device.now() - self._asked[index])
                self._answers.add(index, output)
        except Lost as lost:
            if self._gives_up:
                self._fail(lost)
            raise
        self._answers.finish()

    def _fail(self, lost: Lost) -> None:
        """Give up what was under way when devices were lost."""
        for index in [index for index in self._left if index in self._asked]:
            del self._left[index]
            error = f"{lost} was lost during the inference: use method.on_loss replan to have such requests repeated"
            self._device.record("failed", request=index, error=error, after=self._device.now() - self._asked[index])

    def _ask(self, index: int) -> torch.Tensor:
        self._asked.setdefault(index, self._device.now())
        return self._requests.images(index)
