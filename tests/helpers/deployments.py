"""Deployments as devices read them."""

from __future__ import annotations

from testbed import deployment
from testbed.deployment import deployments
from testbed.method import Method, PlanningProblem
from testbed.plan import Plan
from testbed.prepare import Prepared


def deployment_bodies(prepared: Prepared) -> dict[str, bytes]:
    """Return what each device of an experiment is given."""
    addresses = {
        each.name: f"10.0.0.{number}"
        for number, each in enumerate(prepared.problem.devices)
    }
    given = deployments(prepared, "run-00000000", "token", addresses, "10.0.255.255")
    return {name: given.of(name) for name in addresses}


def read_deployment(body: bytes) -> tuple[Method, PlanningProblem, Plan]:
    """Return the method, the problem and the plan as a device has them."""
    found = deployment.read(body)
    method, problem = found.problem()
    return method, problem, found.plan.with_details(method.Details)
