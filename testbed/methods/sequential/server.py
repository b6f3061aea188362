"""What the lead of an inference chain does: send requests, take in outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.device import Device
from testbed.methods.base import Job
from testbed.methods.parts import messages
from testbed.methods.parts.answers import Answers
from testbed.methods.parts.feed import Requests
from testbed.methods.parts.lead import Lead, Planner, Temper
from testbed.methods.parts.outbox import Outbox
from testbed.methods.parts.worker import Worker
from testbed.methods.sequential.planner import SequentialOptions

if TYPE_CHECKING:
    import torch


class Server(Lead):
    """Has every request answered once, whatever happens to the devices meanwhile."""

    def __init__(
        self, device: Device, job: Job, worker: Worker, outbox: Outbox, temper: Temper, planner: Planner
    ) -> None:
        super().__init__(device, job, worker, outbox, temper, planner)
        assert job.dataset is not None
        assert isinstance(job.problem.options, SequentialOptions)
        workload = job.problem.workload
        self._in_flight = job.problem.options.in_flight
        self._requests = Requests(job.dataset, workload.batch_size, workload.requests)
        self._asked: dict[int, float] = {}
        self._left = dict.fromkeys(range(len(self._requests)))
        self._answers = Answers(device, job.problem.model, self._requests)

    async def work(self) -> None:
        """Send what is not answered yet."""
        async for index, output in self.forward_all(messages.INFER, list(self._left), self._in_flight, self._ask):
            del self._left[index]
            self.device.record("request", request=index, latency=self.device.now() - self._asked[index])
            self._answers.add(index, output)
        self._answers.finish()

    def _ask(self, index: int) -> torch.Tensor:
        self._asked.setdefault(index, self.device.now())
        return self._requests.images(index)
