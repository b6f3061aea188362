"""The workload of the ring example, in which a token circulates: tests of the machinery need no torch."""

from __future__ import annotations

from typing import Any

from tests.helpers import ROOT

RING = str(ROOT / "scenarios" / "examples" / "ring.py")
SPEED = "10gflops"
"""At this speed a device keeps the token for 100 ms."""


def ring_workload(requests: int = 300) -> dict[str, Any]:
    """Return the workload of a ring with this many rounds of the token."""
    method = {"file": RING, "name": "ring"}
    return {
        "task": "infer",
        "model": {"name": "mlp"},
        "method": method,
        "requests": requests,
    }
