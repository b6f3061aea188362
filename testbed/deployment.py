"""What a device is given to know of a run before its program starts: plain facts, as JSON of a versioned schema.

The controller writes it and the agent reads it. Neither a scenario nor the links of other devices travel, unless the
method's program needs those links (`testbed.method.Method.facts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, SerializeAsAny, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json

from testbed import methods
from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.hardware import DeviceSpec
from testbed.method import Method, Problem
from testbed.methods.external import code_of, from_code, register_work
from testbed.network.link import Link
from testbed.plan import Plan
from testbed.wire.token import data_token
from testbed.work import WorkloadPart
from testbed.workload import Prepared, kind_of

VERSION = 1
"""Version of the schema; another one is refused."""


class Peer(BaseModel):
    """Where another device takes messages, and what shows on either side who has sent one."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    address: str
    sent: str
    """Token of the messages to it."""
    received: str
    """Token of those from it."""


class Deployment(BaseModel):
    """The body of ``PUT /deployment``."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    version: int
    run: str
    device: str
    seed: int
    workload: SerializeAsAny[WorkloadPart]
    facts: dict[str, Any] = {}
    """What all devices are told of the problem (`testbed.workload.Workload.facts`)."""
    own_facts: dict[str, Any] = {}
    """What this device is told of it beside that."""
    specs: tuple[DeviceSpec, ...]
    """The kinds of devices there are, without names."""
    devices: dict[str, int]
    """Every device of the run in the order of the scenario, with the number of its kind."""
    work_code: Code | None = None
    """Source text of a kind of work that is no part of this code."""
    method_code: Code | None = None
    """Source text of a method that is no part of this code."""
    plan: Plan
    """The part of the plan that the device's program needs."""
    kinds: tuple[Link, ...] = ()
    """The different links there are."""
    links: tuple[tuple[str, str, int], ...] = ()
    """Source, destination and number of the kind, of the links that the device's program needs."""
    peers: dict[str, Peer] = {}
    """Each device that this one can send to and be answered by."""
    broadcast: str | None = None
    """Address of the data network."""

    @model_validator(mode="after")
    def _numbers_are_of_kinds(self) -> Self:
        if not all(0 <= kind < len(self.specs) for kind in self.devices.values()):
            raise ValueError("a device of no kind that there is")
        if not all(0 <= kind < len(self.kinds) for _, _, kind in self.links):
            raise ValueError("links of no kind that there is")
        if any(kind.rate is not None and not kind.rate > 0 for kind in self.kinds):
            raise ValueError("a link's rate is not above 0 bit/s")
        return self

    def problem(self) -> tuple[Method, Problem]:
        """Return the method, and the problem as the device's program is to see it; raises `InputError`."""
        workload = self.workload
        method = (
            methods.get(workload.method.name, workload.task)
            if self.method_code is None
            else from_code(self.method_code)
        )
        given: Problem = Problem(
            devices=tuple(replace(self.specs[kind], name=name) for name, kind in self.devices.items()),
            links={(source, destination): self.kinds[kind] for source, destination, kind in self.links},
            workload=workload,
            options=method.Options.model_validate(workload.method.options()),
            seed=self.seed,
        )
        return method, kind_of(workload).posed(given, method, {**self.facts, **self.own_facts})


def read(body: bytes | bytearray) -> Deployment:
    """Read what `Deployments.of` wrote; raises `InputError` saying what is wrong with it."""
    try:
        document = from_json(bytes(body))
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise InputError(
                f"this device reads version {VERSION} of the schema, not {version}: build the images again from the "
                "same code with 'testbed setup images'"
            )
        if document.get("work_code") is not None:  # before the keys are read that it defines
            register_work(Code.model_validate(document["work_code"]))
        return Deployment.model_validate(document)
    except ValidationError as error:
        raise InputError(first_problem(error)) from error
    except ValueError as error:
        raise InputError(f"it is no JSON: {error}") from error


def first_problem(error: ValidationError) -> str:
    """Return where the first of the problems is, and what it is."""
    first = error.errors()[0]
    return ": ".join(each for each in (".".join(str(part) for part in first["loc"]), first["msg"]) if each)


@dataclass(frozen=True)
class Deployments:
    """The deployments of all devices of a run. What they have in common is written once."""

    method: Method
    problem: Problem
    plan: Plan
    run: str
    token: str
    """Token of the run; it does not travel."""
    addresses: Mapping[str, str]
    """Address of each device on the data network."""
    broadcast: str | None = None
    method_code: Code | None = None
    work_code: Code | None = None

    def of(self, device: str) -> bytes:
        """Return what a device is given, as JSON."""
        problem, plan = self.method.facts(self.problem, self.plan, device)
        numbers: dict[Link, int] = {}
        known: dict[int, int] = {}  # by identity, since pairs share links and it takes long to compare two
        links = []
        for pair, link in problem.links.items():
            if id(link) not in known:
                known[id(link)] = numbers.setdefault(link, len(numbers))
            links.append((*pair, known[id(link)]))
        pairs = {(source, destination) for source, destination, _ in links}
        peers = [name for source, name, _ in links if source == device and (name, device) in pairs]
        own = {
            "device": device,
            "kinds": [link.to_json() for link in numbers],
            "links": links,
            "peers": {name: self._peer(device, name) for name in peers},
            "own_facts": kind_of(problem.workload).own_facts(problem),
        }
        plan_text = self._plan if plan is self.plan else plan.model_dump_json()
        return f'{self._common[:-1]},"plan":{plan_text},{_json(own)[1:]}'.encode()

    def _peer(self, device: str, peer: str) -> dict[str, str]:
        sent, received = data_token(self.token, device, peer), data_token(self.token, peer, device)
        return {"address": self.addresses[peer], "sent": sent, "received": received}

    @cached_property
    def _plan(self) -> str:
        return self.plan.model_dump_json()

    @cached_property
    def _common(self) -> str:
        """What every device is given."""
        problem = self.problem
        numbers: dict[str, int] = {}
        specs: list[object] = []
        devices: dict[str, int] = {}
        for spec in problem.devices:
            nameless = _adapter(DeviceSpec).dump_python(replace(spec, name=""), mode="json")
            number = devices[spec.name] = numbers.setdefault(_json(nameless), len(numbers))
            if number == len(specs):
                specs.append(nameless)
        return _json(
            {
                "version": VERSION,
                "run": self.run,
                "seed": problem.seed,
                "workload": problem.workload.on_containers().model_dump(mode="json", by_alias=True, exclude_none=True),
                "facts": kind_of(problem.workload).facts(problem),
                "specs": specs,
                "devices": devices,
                "work_code": self.work_code and self.work_code.model_dump(mode="json"),
                "method_code": self.method_code and self.method_code.model_dump(mode="json"),
                "broadcast": self.broadcast,
            }
        )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what writes values of a type; it takes long to make, and a command that only plans needs none."""
    return TypeAdapter(kind)


def _json(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def deployments(
    prepared: Prepared, run: str, token: str, addresses: Mapping[str, str], broadcast: str | None
) -> Deployments:
    """Return what each device is given to know; raises `InputError` where a file of the user's is no text.

    ``addresses`` are the devices' on the data network.
    """
    codes = code_of(prepared.method), code_of(prepared.workload)
    return Deployments(prepared.method, prepared.problem, prepared.plan, run, token, addresses, broadcast, *codes)
