"""The decoded deployment of a device: its method, its planning problem, and its peers."""

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
    """A device with links to and from the own device."""

    address: Address
    slowness: float
    """Round-trip time of a few full packets over the scenario's links, in seconds (`testbed.network.link`)."""
    sent: str
    """Token of the messages to the peer."""
    received: str
    """Token of the messages from the peer."""


@dataclass(frozen=True)
class Deployment:
    """The controller's instructions for the device."""

    work: Workload
    method: Method
    problem: Problem
    plan: Plan
    peers: Mapping[str, Peer]
    broadcast: Address | None
    message_loss: Mapping[str, float]
    """Initial fraction of each peer's broadcasts lost as whole messages."""


def read(body: bytes | bytearray, settings: Settings) -> Deployment:
    """Decode a deployment; raises Refused (400) with the reason if the deployment is invalid."""
    name = settings.device
    try:
        document = deployment.read(body)
        if (document.run, document.device) != (settings.run, name):
            text = f"this is device '{name}' of run '{settings.run}', not '{document.device}' of '{document.run}'"
            raise Refused(400, text)
        if name not in document.devices:
            raise InputError(
                f"device: unknown name '{name}'; the deployment has {', '.join(document.devices)}"
            )
        work = kind_of(document.workload)
        work.begin(document.workload)  # must precede the import of scenario files
        method, problem = document.problem()
        peers = {}
        for peer, entry in document.peers.items():
            ways = [
                pair for pair in ((name, peer), (peer, name)) if pair in problem.links
            ]
            if len(ways) < 2:
                raise InputError(f"peers: '{peer}' needs links in both directions")
            links = [problem.links[pair] for pair in ways]
            peers[peer] = Peer(
                address(entry.address, DATA_PORT),
                slowness(*links),
                entry.sent,
                entry.received,
            )
        message_loss = {peer: problem.links[peer, name].message_loss for peer in peers}
        broadcast = (
            None
            if document.broadcast is None
            else address(document.broadcast, CAST_PORT)
        )
        plan = document.plan.with_details(method.Details)
    except ValidationError as error:
        raise Refused(400, f"deployment: {deployment.first_problem(error)}") from error
    except (InputError, ValueError) as error:
        raise Refused(400, f"deployment: {error}") from error
    return Deployment(work, method, problem, plan, peers, broadcast, message_loss)
