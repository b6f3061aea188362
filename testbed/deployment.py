"""The deployment of a device: the facts about a run that its agent receives before the program starts.

The controller writes a `Deployment` as JSON and the agent reads it with `read`. It contains neither the scenario nor
the links of other devices, unless the method's program needs those links (`testbed.method.Method.facts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from testbed import methods
from testbed.common.errors import InputError, format_key
from testbed.common.usercode import Code
from testbed.hardware import DeviceSpec
from testbed.method import Method, PlanningProblem
from testbed.methods.external import code_of, from_code, register_work
from testbed.network.link import Link
from testbed.plan import Plan
from testbed.wire.token import data_token
from testbed.work import WorkloadPart
from testbed.workload import Prepared, workload_of

VERSION = 1
"""Version of the schema; another one is refused."""


class Peer(BaseModel):
    """Address and message tokens of another device."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    address: str
    sent: str
    """Token of messages sent to the peer."""
    received: str
    """Token of messages received from the peer."""


class Deployment(BaseModel):
    """The body of ``PUT /deployment``."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    version: int
    run: str
    device: str
    seed: int
    workload: SerializeAsAny[WorkloadPart]
    facts: dict[str, Any] = {}
    """Facts of the problem shared by all devices (`testbed.workload.Workload.facts`)."""
    own_facts: dict[str, Any] = {}
    """Further facts of the problem for this device only."""
    specs: tuple[DeviceSpec, ...]
    """The distinct device specifications, without names."""
    devices: dict[str, int]
    """Index into `specs` of every device of the run, in the order of the scenario."""
    work_code: Code | None = None
    """Source text of a workload from a package; None for the testbed's own."""
    method_code: Code | None = None
    """Source text of a method from a file or package, without modules of `work_code`; None for the testbed's own."""
    plan: Plan
    """The part of the plan relevant to the device."""
    kinds: tuple[Link, ...] = ()
    """The distinct properties of links."""
    links: tuple[tuple[str, str, int], ...] = ()
    """Source, destination and index into `kinds` of each link known to the program."""
    peers: dict[str, Peer] = {}
    """Peers of the device by name."""
    broadcast: str | None = None
    """Broadcast address of the data network."""

    @model_validator(mode="after")
    def _check_indices(self) -> Self:
        # The body comes over the network: a negative index would silently count from the end.
        if not all(0 <= index < len(self.specs) for index in self.devices.values()):
            raise ValueError("a device refers to an unknown specification")
        if not all(0 <= index < len(self.kinds) for _, _, index in self.links):
            raise ValueError("a link refers to an unknown specification")
        if any(link.rate is not None and not link.rate > 0 for link in self.kinds):
            raise ValueError("a link's rate is not above 0 bit/s")
        return self

    def problem(self) -> tuple[Method, PlanningProblem]:
        """Import the method and build the device's view of the problem. Raises `InputError` if the code cannot be
        loaded."""
        workload, code = self.workload, self.method_code
        if code is None:
            method = methods.get(workload.method.name, workload.task)
        else:
            # Modules that workload and method share are sent once, with the workload.
            shared = self.work_code.sources if self.work_code is not None else {}
            sources = {**shared, **code.sources}
            method = from_code(code.model_copy(update={"sources": sources}))
        devices = [
            replace(self.specs[index], name=name)
            for name, index in self.devices.items()
        ]
        links = {
            (source, destination): self.kinds[index]
            for source, destination, index in self.links
        }
        options = method.Options.model_validate(workload.method.options())
        base_problem: PlanningProblem = PlanningProblem(
            tuple(devices), links, workload, options, self.seed
        )
        facts = {**self.facts, **self.own_facts}
        return method, workload_of(workload).rebuild_problem(
            base_problem, method, facts
        )


def read(body: bytes | bytearray) -> Deployment:
    """Parse a deployment as written by `Deployments.of`. Raises `InputError` naming the first invalid field."""
    try:
        document = from_json(bytes(body))
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise InputError(
                f"this device reads version {VERSION} of the schema, not {version}: build the images again from the "
                "same code with 'testbed setup images'"
            )
        # Before validation: the package's workload defines the keys of `workload`.
        if document.get("work_code") is not None:
            register_work(Code.model_validate(document["work_code"]))
        return Deployment.model_validate(document)
    except ValidationError as error:
        raise InputError(first_problem(error)) from error
    except ValueError as error:
        raise InputError(f"invalid JSON: {error}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first validation problem as ``location: message``."""
    first = error.errors()[0]
    location = format_key(first["loc"])
    return f"{location}: {first['msg']}" if location else first["msg"]


@dataclass(frozen=True)
class Deployments:
    """The deployments of all devices of a run. Common parts are serialised once."""

    method: Method
    problem: PlanningProblem
    plan: Plan
    run: str
    token: str
    """Token of the run; never part of a deployment."""
    addresses: Mapping[str, str]
    """Address of each device on the data network."""
    broadcast: str | None = None
    method_code: Code | None = None
    work_code: Code | None = None

    def of(self, device: str) -> bytes:
        """Return the deployment of a device as JSON."""
        problem, plan = self.method.facts(self.problem, self.plan, device)
        numbers: dict[Link, int] = {}
        # By identity, since pairs share link objects and a comparison of two links takes long.
        numbers_by_id: dict[int, int] = {}
        links = []
        peers = {}
        for pair, link in problem.links.items():
            if id(link) not in numbers_by_id:
                numbers_by_id[id(link)] = numbers.setdefault(link, len(numbers))
            links.append((*pair, numbers_by_id[id(link)]))
            source, destination = pair
            # A message and its acknowledgement take both directions.
            if source == device and (destination, device) in problem.links:
                peers[destination] = self._peer_entry(device, destination)
        device_fields = {
            "device": device,
            "kinds": [link.to_json() for link in numbers],
            "links": links,
            "peers": peers,
            "own_facts": workload_of(problem.workload).own_facts(problem),
        }
        # The coordinator gets the whole plan, which may be long and is serialised once.
        plan_text = self._plan_json if plan is self.plan else plan.model_dump_json()
        # Three JSON texts are joined to one object, without parsing them again.
        common = self._common_fields.removesuffix("}")
        own = _to_json_text(device_fields).removeprefix("{")
        return f'{common},"plan":{plan_text},{own}'.encode()

    def _peer_entry(self, device: str, peer: str) -> dict[str, str]:
        return {
            "address": self.addresses[peer],
            "sent": data_token(self.token, device, peer),
            "received": data_token(self.token, peer, device),
        }

    @cached_property
    def _plan_json(self) -> str:
        return self.plan.model_dump_json()

    @cached_property
    def _common_fields(self) -> str:
        """Return the JSON fields common to all devices."""
        problem = self.problem
        numbers: dict[str, int] = {}
        specs: list[object] = []
        devices: dict[str, int] = {}
        adapter = _type_adapter(DeviceSpec)
        for spec in problem.devices:
            nameless = adapter.dump_python(replace(spec, name=""), mode="json")
            number = numbers.setdefault(_to_json_text(nameless), len(numbers))
            devices[spec.name] = number
            # A specification is listed once: most devices of a large run are alike.
            if number == len(specs):
                specs.append(nameless)
        workload = problem.workload.on_containers()
        fields = {
            "version": VERSION,
            "run": self.run,
            "seed": problem.seed,
            "workload": workload.model_dump(
                mode="json", by_alias=True, exclude_none=True
            ),
            "facts": workload_of(problem.workload).facts(problem),
            "specs": specs,
            "devices": devices,
            "work_code": _dump_code(self.work_code),
            "method_code": _dump_code(self.method_code),
            "broadcast": self.broadcast,
        }
        return _to_json_text(fields)


def _dump_code(code: Code | None) -> Any:
    return None if code is None else code.model_dump(mode="json")


@cache
def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return a cached serialiser. Building one is slow, and planning commands need none."""
    return TypeAdapter(kind)


def _to_json_text(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def deployments(
    prepared: Prepared,
    run: str,
    token: str,
    addresses: Mapping[str, str],
    broadcast: str | None,
) -> Deployments:
    """Build the deployments of a prepared run. Raises `InputError` if a user's file is not text.

    ``addresses`` are the devices' on the data network.
    """
    method_code, work_code = code_of(prepared.method), code_of(prepared.workload)
    if method_code is not None and work_code is not None:
        # A package with both is sent once, with the workload.
        sources = {}
        for name, text in method_code.sources.items():
            if name not in work_code.sources:
                sources[name] = text
        method_code = method_code.model_copy(update={"sources": sources})
    return Deployments(
        prepared.method,
        prepared.problem,
        prepared.plan,
        run,
        token,
        addresses,
        broadcast,
        method_code,
        work_code,
    )
