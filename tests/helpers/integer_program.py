"""The integer program of Stahl et al., equations (11) to (13), solved by scipy's HiGHS: an oracle for the dynamic one.

For each layer l the binary variables o, i, f, s say LOP, LIP, first and second of a fused pair. The reuse term of
equation (7) multiplies two of them, o_{l-1} and o_l; so each saving gets a variable of its own between 0 and 1 that
may not exceed either, which the minimisation drives to their product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from testbed.ml.models.graph import Graph
from testbed_stahl.plan import Scheme
from testbed_stahl.schemes import Reuse, Schemes, WorkerTotals, layer_communication

_SCHEMES: tuple[Scheme, ...] = ("lop", "lip", "fuse1", "fuse2")


@dataclass
class _Program:
    """Minimise costs x variables; every variable lies between 0 and its upper bound."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    """Factors by variable, and between what their sum lies."""

    def variable(self, cost: float, upper: float, integral: bool) -> int:
        """Add a variable and return its number."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.costs) - 1

    def solve(self) -> list[float]:
        """Return the variables of an optimum."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix = np.zeros((len(self.rows), len(self.costs)))
        for number, (factors, _, _) in enumerate(self.rows):
            for column, factor in factors.items():
                matrix[number, column] = factor
        # Costs go into the millions: scaled, so that the solver's absolute tolerances are far below one element.
        scale = max(1.0, *map(abs, self.costs))
        solution = milp(
            np.array(self.costs) / scale,
            integrality=np.array(self.integral, dtype=int),
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(
                matrix, [row[1] for row in self.rows], [row[2] for row in self.rows]
            ),
            options={"mip_rel_gap": 0.0},
        )
        if solution.x is None:
            raise RuntimeError(
                f"the integer program has no solution: {solution.message}"
            )
        return [float(value) for value in solution.x]


def optimal_schemes(
    graph: Graph,
    workers: WorkerTotals,
    reuse: Reuse = "with-reuse",
    first: int = 0,
    lip: bool = True,
) -> Schemes:
    """Return schemes with the least C from layer ``first`` on. Of equals any, so compare by what they cost.

    Without ``lip`` only LOP and fused pairs are looked at, as the variants of the paper's Table 2 do.
    """
    layers = graph.layers
    split = [index for index in range(first, len(layers)) if layers[index].splits]
    schemes: list[Scheme] = [
        "tiled" if index < first else "whole" for index in range(len(layers))
    ]
    if not split:
        return tuple(schemes)
    program = _Program()
    chosen: dict[tuple[int, Scheme], int] = {}
    for index in split:
        # (13), and likewise where pooling or a route comes in between.
        able = {
            "lop": True,
            "lip": lip,
            "fuse1": graph.fuses(index),
            "fuse2": index - 1 in split and graph.fuses(index - 1),
        }
        for scheme in _SCHEMES:
            cost = float(
                layer_communication(layers[index], scheme, workers, False, reuse)
            )
            chosen[index, scheme] = program.variable(cost, float(able[scheme]), True)
        program.rows.append(
            ({chosen[index, scheme]: 1.0 for scheme in _SCHEMES}, 1.0, 1.0)
        )  # (11)
    for index in split:
        if graph.fuses(index):
            program.rows.append(
                (
                    {chosen[index + 1, "fuse2"]: 1.0, chosen[index, "fuse1"]: -1.0},
                    0.0,
                    0.0,
                )
            )  # (12)
        if index - 1 in split and graph.follows(index):
            _reuse(program, graph, index, chosen, workers, reuse)
    values = program.solve()
    for (index, scheme), number in chosen.items():
        if values[number] > 0.5:
            schemes[index] = scheme
    return tuple(schemes)


def _reuse(
    program: _Program,
    graph: Graph,
    index: int,
    chosen: dict[tuple[int, Scheme], int],
    workers: WorkerTotals,
    reuse: Reuse,
) -> None:
    """Add what a layer saves where the one before it uses LOP."""
    for scheme in _SCHEMES:
        alone, after = (
            layer_communication(graph.layers[index], scheme, workers, held, reuse)
            for held in (False, True)
        )
        if after < alone:
            saving = program.variable(float(after - alone), 1.0, False)
            for bound in (chosen[index - 1, "lop"], chosen[index, scheme]):
                program.rows.append(({saving: 1.0, bound: -1.0}, -math.inf, 0.0))
