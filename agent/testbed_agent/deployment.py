"""The decoded deployment of a device: its method, its planning problem, and its peers.

The controller sends a `testbed.deployment.Deployment` as JSON. `read_deployment` checks that this device is meant, and
turns the JSON into the objects that the program needs.
"""

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
    """Round-trip time of a few full packets over the scenario's links, in seconds (`testbed.network.link.slowness`)."""
    send_token: str
    """Token of the messages to the peer."""
    receive_token: str
    """Token of the messages from the peer."""


@dataclass(frozen=True)
class Deployment:
    """The controller's instructions for the device."""

    work: Workload
    """Kind of work, such as training."""
    method: Method
    problem: PlanningProblem
    """The planning problem, with only the facts for this device."""
    plan: Plan
    """The device's part of the plan; on the coordinator, the whole plan."""
    peers: Mapping[str, Peer]
    """The other devices by name."""
    broadcast: Address | None
    """Destination of broadcasts; None if the network has no broadcast address."""
    message_loss: Mapping[str, float]
    """Initial fraction of each peer's broadcasts lost as whole messages, by peer."""


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
    # Sets process-wide state, which must precede the import of the scenario's code by `problem`.
    work.begin(document.workload)
    method, problem = document.problem()
    peers = {}
    message_loss = {}
    for peer, entry in document.peers.items():
        forward = problem.links.get((name, peer))
        backward = problem.links.get((peer, name))
        if forward is None or backward is None:
            raise InputError(f"peers: '{peer}' needs links in both directions")
        peers[peer] = Peer(
            address=parse_address(entry.address, DATA_PORT),
            slowness=slowness(forward, backward),
            send_token=entry.sent,
            receive_token=entry.received,
        )
        # Only broadcasts from the peer are received here.
        message_loss[peer] = backward.message_loss
    broadcast = None
    if document.broadcast is not None:
        broadcast = parse_address(document.broadcast, CAST_PORT)
    plan = document.plan.with_details(method.Details)
    return Deployment(work, method, problem, plan, peers, broadcast, message_loss)
