"""Messages of one size from one device to another: what links and transport do before any model is split."""

from __future__ import annotations

from testbed.device import Device
from testbed.errors import InputError
from testbed.methods.base import Assignment, Job, Method, Options, Plan, Problem
from testbed.models.chain import BYTES_PER_VALUE
from testbed.scenario.quantities import Size
from testbed.wire import Message

DEFAULT_REQUESTS = 50


class ExchangeOptions(Options):
    """Options of `Exchange`."""

    payload: Size = 1e6
    """Bytes of the tensor in each message."""
    peer: str | None = None
    """Who receives them; None is the second device of the scenario."""


class Exchange(Method):
    """The first device sends, one message after the other; a request is over when its message is acknowledged."""

    name = "exchange"
    summary = "messages of one size between two devices, to measure links and transport"
    tasks = ("infer",)
    Options = ExchangeOptions

    def plan(self, problem: Problem) -> Plan:
        """Name the two devices. Raises `InputError` where there is no such pair."""
        source, peer = problem.devices[0].name, self._peer(problem)
        if (source, peer) not in problem.links or (peer, source) not in problem.links:
            raise InputError(f"method.peer: there is no link between '{source}' and '{peer}'")
        ends = (source, peer)
        parts = tuple(Assignment(device=name, first=0, last=0, memory=self._payload(problem)) for name in ends)
        return Plan(method=self.name, lead=source, assignments=parts)

    async def program(self, device: Device, job: Job) -> None:
        """Send on the lead, take in on its peer, nothing elsewhere."""
        peer = self._peer(job.problem)
        if device.name == peer:
            while True:
                await device.receive()
        if device.name != job.plan.lead:
            return
        import torch

        payload = torch.zeros(int(self._payload(job.problem)) // BYTES_PER_VALUE)
        for request in range(job.problem.workload.requests or DEFAULT_REQUESTS):
            began = device.now()
            await device.send(peer, Message("payload", {"request": request}, {"payload": payload}))
            device.record("request", request=request, latency=device.now() - began)

    def spans(self, plan: Plan, device: str) -> frozenset[str]:
        """Return nothing: nobody computes."""
        return frozenset()

    def _peer(self, problem: Problem) -> str:
        options = problem.options
        assert isinstance(options, ExchangeOptions)
        names = [device.name for device in problem.devices]
        if len(names) < 2:
            raise InputError("devices: an exchange needs two of them")
        peer = options.peer or names[1]
        if peer not in names[1:]:
            raise InputError(f"method.peer: there is no other device '{peer}'; choose one of {', '.join(names[1:])}")
        return peer

    def _payload(self, problem: Problem) -> float:
        assert isinstance(problem.options, ExchangeOptions)
        return problem.options.payload
