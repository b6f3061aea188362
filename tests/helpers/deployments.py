"""Deployments as devices receive and read them."""

from __future__ import annotations

from testbed import deployment
from testbed.deployment import deployments
from testbed.method import Method, PlanningProblem
from testbed.plan import Plan
from testbed.prepare import Prepared


def deployment_bodies(prepared: Prepared) -> dict[str, bytes]:
    """Return the encoded deployment of each device."""
    addresses = {
        device.name: f"10.0.0.{number}"
        for number, device in enumerate(prepared.problem.devices)
    }
    broadcast = "10.0.255.255"
    encoder = deployments(prepared, "run-00000000", "token", addresses, broadcast)
    return {name: encoder.of(name) for name in addresses}


def read_deployment(body: bytes) -> tuple[Method, PlanningProblem, Plan]:
    """Return the method, the planning problem and the plan decoded by a device."""
    decoded = deployment.read(body)
    method, problem = decoded.problem()
    return method, problem, decoded.plan.with_details(method.Details)
