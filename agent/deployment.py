"""A deployment: everything a device needs to know before its program can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, ValidationError

from agent.http import Refused
from agent.settings import Address, Settings, address
from testbed.common.errors import InputError
from testbed.method import Method, Problem
from testbed.network.link import Link, Pair
from testbed.plan import Plan
from testbed.prepare import Carried, build_problem
from testbed.scenario.expand import trials
from testbed.scenario.schema import Scenario
from testbed.wire.ports import CAST_PORT, DATA_PORT

_FEW_PACKETS = 8 * 1514
"""Bytes that a kernel puts into a queue before it waits for acknowledgements, generously."""


class _Document(BaseModel):
    """The body of ``PUT /deployment``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    device: str
    scenario: Scenario
    plan: Plan
    carried: Carried = Carried()
    samples: dict[str, int] = {}
    peers: dict[str, str]
    broadcast: str | None = None


@dataclass(frozen=True)
class Peer:
    """A device that this one can send to, and be answered by."""

    address: Address
    slowness: float
    """Seconds that a few full packets there and back take as the scenario has the links."""


@dataclass(frozen=True)
class Deployment:
    """What the controller wants this device to be."""

    method: Method
    problem: Problem
    plan: Plan
    peers: Mapping[str, Peer]
    broadcast: Address | None
    message_loss: Mapping[str, float]
    """Fraction of each peer's casts that this device loses whole, to begin with."""


def read(body: bytes | bytearray, settings: Settings) -> Deployment:
    """Validate a deployment.

    Raises Refused (400), saying what is wrong with it.
    """
    try:
        document = _Document.model_validate_json(bytes(body))
        if (document.run, document.device) != (settings.run, settings.device):
            raise Refused(
                400,
                f"this is device '{settings.device}' of run '{settings.run}',"
                f" not '{document.device}' of '{document.run}'",
            )
        method, problem = build_problem(trials(document.scenario)[0], document.carried)
        problem = replace(problem, samples=document.samples)
        problem.device(settings.device)
        plan = document.plan.with_details(method.Details)
        peers = {
            name: Peer(
                address(text, DATA_PORT), _slowness([problem.links[pair] for pair in _ways(settings.device, name)])
            )
            for name, text in document.peers.items()
            if all(pair in problem.links for pair in _ways(settings.device, name))
        }
        message_loss = {name: problem.links[name, settings.device].message_loss for name in peers}
        broadcast = None if document.broadcast is None else address(document.broadcast, CAST_PORT)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(400, f"deployment: {where}: {first['msg']}") from error
    except (InputError, ValueError) as error:
        raise Refused(400, f"deployment: {error}") from error
    except StopIteration as error:
        raise Refused(400, f"deployment: its scenario has no device '{settings.device}'") from error
    return Deployment(method, problem, plan, peers, broadcast, message_loss)


def _ways(device: str, peer: str) -> tuple[Pair, Pair]:
    return (device, peer), (peer, device)


def _slowness(links: list[Link]) -> float:
    return sum(link.delay + link.transmission_time(_FEW_PACKETS) for link in links)
