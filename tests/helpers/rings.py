"""A token that goes round, which needs no torch: for tests in which it does not matter what devices compute."""

from __future__ import annotations

from typing import Any

from tests.helpers import ROOT

RING = str(ROOT / "scenarios" / "examples" / "ring.py")
SPEED = "10gflops"
"""With which a device holds the token for 100 ms."""


def ring_workload(requests: int = 300) -> dict[str, Any]:
    """Return that of so many rounds."""
    method = {"file": RING, "name": "ring"}
    return {
        "task": "infer",
        "model": {"name": "mlp"},
        "method": method,
        "requests": requests,
    }
