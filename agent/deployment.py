"""A deployment: everything a device needs to know before its program can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from agent.http import Refused
from agent.settings import CAST_PORT, DATA_PORT, Address, Settings, address
from testbed.errors import InputError
from testbed.methods.base import Method, Plan, Problem
from testbed.scenario.expand import experiments
from testbed.scenario.prepare import pose
from testbed.scenario.schema import Scenario


class _Document(BaseModel):
    """The body of ``PUT /deployment``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    run: str
    device: str
    scenario: Scenario
    plan: Plan
    peers: dict[str, str]
    broadcast: str | None = None


@dataclass(frozen=True)
class Deployment:
    """What the controller wants this device to be."""

    method: Method
    problem: Problem
    plan: Plan
    peers: Mapping[str, Address]
    """Those that this device is linked with both ways."""
    broadcast: Address | None


def read(body: bytes | bytearray, settings: Settings) -> Deployment:
    """Validate a deployment.

    Raises:
        Refused: 400, saying what is wrong with it.
    """
    try:
        document = _Document.model_validate_json(bytes(body))
        if (document.run, document.device) != (settings.run, settings.device):
            raise Refused(
                400,
                f"this is device '{settings.device}' of run '{settings.run}',"
                f" not '{document.device}' of '{document.run}'",
            )
        method, problem = pose(experiments(document.scenario)[0])
        problem.device(settings.device)
        peers = {
            name: address(text, DATA_PORT)
            for name, text in document.peers.items()
            if (settings.device, name) in problem.links and (name, settings.device) in problem.links
        }
        broadcast = None if document.broadcast is None else address(document.broadcast, CAST_PORT)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(400, f"deployment: {where}: {first['msg']}") from error
    except (InputError, ValueError) as error:
        raise Refused(400, f"deployment: {error}") from error
    except StopIteration as error:
        raise Refused(400, f"deployment: its scenario has no device '{settings.device}'") from error
    return Deployment(method, problem, document.plan, peers, broadcast)
