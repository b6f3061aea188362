"""The decoded deployment of a device: its method, its planning problem, and its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from testbed import deployment
from testbed.common.errors import InputError
from testbed.method import Method, PlanningProblem
from testbed.network.link import slowness
from testbed.plan import Plan
from testbed.wire.ports import CAST_PORT, DATA_PORT
from testbed.workload import Workload, workload_of
from testbed_agent.http import Refused
from testbed_agent.settings import Address, Settings, parse_address


@dataclass(frozen=True)
class Peer:
    """Another device, with links in both directions."""

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
    problem: PlanningProblem
    plan: Plan
    peers: Mapping[str, Peer]
    broadcast: Address | None
    message_loss: Mapping[str, float]
    """Initial fraction of each peer's broadcasts lost as whole messages."""


def read_deployment(body: bytes | bytearray, settings: Settings) -> Deployment:
    """Decode a deployment; raises Refused (400) with the reason if the deployment is invalid."""
    try:
        return _decode(body, settings)
    except ValidationError as error:
        raise Refused(400, f"deployment: {deployment.first_problem(error)}") from error
    except (InputError, ValueError) as error:
        raise Refused(400, f"deployment: {error}") from error


def _decode(body: bytes | bytearray, settings: Settings) -> Deployment:
    name = settings.device
    document = deployment.read(body)
    # Addresses are reused, so a deployment may reach the device of another run.
    if (document.run, document.device) != (settings.run, name):
        text = f"this is device '{name}' of run '{settings.run}', not '{document.device}' of '{document.run}'"
        raise Refused(400, text)
    if name not in document.devices:
        raise InputError(
            f"device: unknown name '{name}'; the deployment has {', '.join(document.devices)}"
        )
    work = workload_of(document.workload)
    work.begin(document.workload)  # must precede the import of scenario files
    method, problem = document.problem()
    peers = {}
    message_loss = {}
    for peer, entry in document.peers.items():
        there = problem.links.get((name, peer))
        back = problem.links.get((peer, name))
        if there is None or back is None:
            raise InputError(f"peers: '{peer}' needs links in both directions")
        peer_address = parse_address(entry.address, DATA_PORT)
        round_trip = slowness(there, back)
        peers[peer] = Peer(peer_address, round_trip, entry.sent, entry.received)
        message_loss[peer] = back.message_loss
    broadcast = None
    if document.broadcast is not None:
        broadcast = parse_address(document.broadcast, CAST_PORT)
    plan = document.plan.with_details(method.Details)
    return Deployment(work, method, problem, plan, peers, broadcast, message_loss)
