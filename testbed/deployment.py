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

from pydantic import Base64Bytes, BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from pydantic_core import from_json

from testbed import methods
from testbed.common.errors import InputError
from testbed.common.usercode import Code
from testbed.hardware import DeviceSpec
from testbed.method import Method, Problem
from testbed.methods.external import from_code
from testbed.ml.fields import Entering, Fields
from testbed.ml.lazy import torch
from testbed.ml.models import create
from testbed.ml.models.chain import Model
from testbed.ml.models.own import create_own
from testbed.network.link import Link
from testbed.plan import Plan
from testbed.wire import arrays
from testbed.wire.token import data_token
from testbed.workload import WorkloadPart

Weights = Mapping[str, "torch.Tensor"]

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
    workload: WorkloadPart
    shape: tuple[int, ...]
    """Shape of a sample."""
    classes: int
    integers: bool
    """Whether the model takes samples of whole numbers."""
    fields: Fields = ()
    """The inputs that a sample consists of, where there are several."""
    specs: tuple[DeviceSpec, ...]
    """The kinds of devices there are, without names."""
    devices: dict[str, int]
    """Every device of the run in the order of the scenario, with the number of its kind."""
    samples: dict[str, int] = {}
    """Training samples by device, of those that own data."""
    method_code: Code | None = None
    """Source text of a method that is no part of this code."""
    model_code: Code | None = None
    """The same of a model."""
    codes: dict[str, Code] = {}
    """The same of what its training takes from files."""
    files: dict[str, Base64Bytes] = {}
    """What the device's own program finds in its folder, by the name in the scenario."""
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
        workload, name = self.workload, self.workload.method.name
        method = methods.get(name) if self.method_code is None else from_code(self.method_code)
        return method, Problem(
            model=model_of(workload, self.model_code, self.classes, Entering(self.shape, self.integers, self.fields)),
            devices=tuple(replace(self.specs[kind], name=name) for name, kind in self.devices.items()),
            links={(source, destination): self.kinds[kind] for source, destination, kind in self.links},
            workload=workload,
            options=method.Options.model_validate(workload.method.options()),
            seed=self.seed,
            samples=self.samples,
            files=self.files,
            codes=self.codes,
            frozen_placed="fixed_units" in method.supports,
        )


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
    model_code: Code | None = None

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
            "files": _adapter(dict[str, Base64Bytes]).dump_python(dict(problem.files), mode="json"),
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
                "workload": _alone(problem.workload).model_dump(mode="json", by_alias=True, exclude_none=True),
                "shape": problem.model.input,
                "classes": problem.model.classes,
                "integers": problem.model.integers,
                "fields": _adapter(Fields).dump_python(problem.model.fields, mode="json"),
                "specs": specs,
                "devices": devices,
                "samples": dict(problem.samples),
                "method_code": self.method_code and self.method_code.model_dump(mode="json"),
                "model_code": self.model_code and self.model_code.model_dump(mode="json"),
                "codes": {name: code.model_dump(mode="json") for name, code in problem.codes.items()},
                "broadcast": self.broadcast,
            }
        )


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return what writes values of a type; it takes long to make, and a command that only plans needs none."""
    return TypeAdapter(kind)


def _alone(workload: WorkloadPart) -> WorkloadPart:
    """Return the workload of a device in a container, where there is no other device to compute together with."""
    return workload.model_copy(update={"numerics": "full"}) if workload.numerics == "stacked" else workload


def _json(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def frozen_part(problem: Problem, weights: Weights | None) -> dict[str, torch.Tensor]:
    """Return the given weights that are placed on every device before the run; empty where messages carry them all."""
    model = problem.model
    if weights is None or problem.training.frozen_travels or not model.frozen:
        return {}
    from testbed.ml.models.modules import frozen_names

    with torch.device("meta"):
        names = frozen_names(model.build(0, len(model.units), 0))
    return {name: tensor for name, tensor in weights.items() if name in names}


def with_frozen(problem: Problem, frozen: Weights) -> Problem:
    """Return a problem whose model builds frozen weights with these values instead of the seed's."""
    return replace(problem, model=replace(problem.model, given=frozen)) if frozen else problem


def complete(problem: Problem, trained: bytes, given: Weights | None) -> bytes:
    """Return the weights that a run leaves with the frozen ones, which no message has carried; both safetensors."""
    model = problem.model
    if problem.training.frozen_travels or not model.frozen:
        return trained
    from testbed.ml.models.modules import frozen_names

    placed = with_frozen(problem, frozen_part(problem, given)).model
    module = placed.build(0, len(model.units), problem.seed)
    whole, frozen = arrays.unpack(bytearray(trained)), frozen_names(module)
    whole |= {name: tensor for name, tensor in module.state_dict().items() if name in frozen}
    return arrays.pack(whole)


def model_of(workload: WorkloadPart, code: Code | None, classes: int, entering: Entering) -> Model:
    """Return a workload's model for what the data are; ``code`` is the text of one's own. Raises `InputError`."""
    part = workload.model
    if workload.task == "program":
        return Model("none", (1,), 1, ())
    if code is None:
        return create(part.name, part.options(), entering.shape, classes).initialised(
            workload.initialisation or "lecun"
        )
    if workload.initialisation is not None:
        text = f"'{part.title}' draws its weights itself: leave this out, and initialise them in its file"
        raise InputError(text, ("initialisation",))
    shape, whole, fields = entering.shape, entering.integers, entering.fields
    return create_own(code, part.options(), shape, classes, part.units, whole, fields)
