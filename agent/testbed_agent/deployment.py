"""What a deployment makes of this device: its method, its problem, and its peers with what their links are like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from testbed import deployment
from testbed.common.errors import InputError
from testbed.method import Method, Problem
from testbed.network.link import slowness
from testbed.plan import Plan
from testbed.wire.ports import CAST_PORT, DATA_PORT
from testbed.workload import Workload, kind_of
from testbed_agent.http import Refused
from testbed_agent.settings import Address, Settings, address


@dataclass(frozen=True)
class Peer:
    """A device that this one can send to, and be answered by."""

    address: Address
    slowness: float
    """Seconds that a few full packets there and back take as the scenario has the links (`testbed.network.link`)."""
    sent: str
    """Token of the messages to it."""
    received: str
    """Token of those from it."""


@dataclass(frozen=True)
class Deployment:
    """What the controller wants this device to be."""

    work: Workload
    method: Method
    problem: Problem
    plan: Plan
    peers: Mapping[str, Peer]
    broadcast: Address | None
    message_loss: Mapping[str, float]
    """Fraction of each peer's casts that this device loses whole, to begin with."""


def read(body: bytes | bytearray, settings: Settings) -> Deployment:
    """Read a deployment.

    Raises Refused (400), saying what is wrong with it.
    """
    name = settings.device
    try:
        found = deployment.read(body)
        if (found.run, found.device) != (settings.run, name):
            text = f"this is device '{name}' of run '{settings.run}', not '{found.device}' of '{found.run}'"
            raise Refused(400, text)
        if name not in found.devices:
            raise InputError(f"device: '{name}' is none of its devices")
        work = kind_of(found.workload)
        work.begin(found.workload)  # before files of a scenario are imported
        method, problem = found.problem()
        peers = {}
        for peer, given in found.peers.items():
            ways = [pair for pair in ((name, peer), (peer, name)) if pair in problem.links]
            if len(ways) < 2:
                raise InputError(f"peers: there are no links with '{peer}' both ways")
            links = [problem.links[pair] for pair in ways]
            peers[peer] = Peer(address(given.address, DATA_PORT), slowness(*links), given.sent, given.received)
        message_loss = {peer: problem.links[peer, name].message_loss for peer in peers}
        broadcast = None if found.broadcast is None else address(found.broadcast, CAST_PORT)
        plan = found.plan.with_details(method.Details)
    except ValidationError as error:
        raise Refused(400, f"deployment: {deployment.first_problem(error)}") from error
    except (InputError, ValueError) as error:
        raise Refused(400, f"deployment: {error}") from error
    return Deployment(work, method, problem, plan, peers, broadcast, message_loss)
