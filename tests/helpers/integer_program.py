"""The integer program of Stahl et al., equations (11) to (13), solved by scipy's HiGHS.

It is an oracle for the dynamic program. For each layer l, the binary variables o, i, f and s select LOP, LIP, the first
and the second layer of a fused pair. The reuse term of equation (7) multiplies o_{l-1} and o_l. To keep the program
linear, each saving has its own variable between 0 and 1 that may exceed neither factor; the minimisation drives this
variable to their product.
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
    """A linear program: minimise costs x variables, where each variable lies between 0 and an upper bound."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)
    """Factors by variable, with the lower and the upper bound of their weighted sum."""

    def variable(self, cost: float, upper: float, integral: bool) -> int:
        """Add a variable and return the number of the new column."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.integral.append(integral)
        return len(self.costs) - 1

    def solve(self) -> list[float]:
        """Return the values of the variables at an optimum."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix = np.zeros((len(self.rows), len(self.costs)))
        for number, (factors, _, _) in enumerate(self.rows):
            for column, factor in factors.items():
                matrix[number, column] = factor
        # Costs reach millions of elements. Scaling puts the solver's absolute tolerances far below one element.
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
    """Return schemes with the least communication C from layer ``first`` on.

    Several choices may be optimal: compare results by their communication. Without ``lip``, only LOP and fused pairs
    are considered, as in the variants of the paper's Table 2.
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
        # Equation (13); a fused pair cannot span pooling or a route either.
        allowed = {
            "lop": True,
            "lip": lip,
            "fuse1": graph.fuses(index),
            "fuse2": index - 1 in split and graph.fuses(index - 1),
        }
        for scheme in _SCHEMES:
            cost = layer_communication(
                layers[index], scheme, workers, holds_share=False, reuse=reuse
            )
            chosen[index, scheme] = program.variable(
                float(cost), upper=float(allowed[scheme]), integral=True
            )
        # Equation (11): each layer uses exactly one scheme.
        factors = {chosen[index, scheme]: 1.0 for scheme in _SCHEMES}
        program.rows.append((factors, 1.0, 1.0))
    for index in split:
        if graph.fuses(index):
            # Equation (12): the second layer of a pair follows the first.
            factors = {chosen[index + 1, "fuse2"]: 1.0, chosen[index, "fuse1"]: -1.0}
            program.rows.append((factors, 0.0, 0.0))
        if index - 1 in split and graph.follows(index):
            _add_reuse(program, graph, index, chosen, workers, reuse)
    values = program.solve()
    for (index, scheme), number in chosen.items():
        if values[number] > 0.5:
            schemes[index] = scheme
    return tuple(schemes)


def _add_reuse(
    program: _Program,
    graph: Graph,
    index: int,
    chosen: dict[tuple[int, Scheme], int],
    workers: WorkerTotals,
    reuse: Reuse,
) -> None:
    """Add the saving of a layer after a layer with LOP, equation (7)."""
    for scheme in _SCHEMES:
        layer = graph.layers[index]
        alone = layer_communication(
            layer, scheme, workers, holds_share=False, reuse=reuse
        )
        after_lop = layer_communication(
            layer, scheme, workers, holds_share=True, reuse=reuse
        )
        if after_lop < alone:
            cost = float(after_lop - alone)
            saving = program.variable(cost, upper=1.0, integral=False)
            for bound in (chosen[index - 1, "lop"], chosen[index, scheme]):
                program.rows.append(({saving: 1.0, bound: -1.0}, -math.inf, 0.0))
