"""Communication of LOP, LIP and fused pairs, and the schemes with the minimum (Stahl et al., Sections 4.1 to 4.3).

LOP (layer output partitioning): each device computes some outputs of a layer from all inputs. LIP (layer input
partitioning): each device computes the contribution of some inputs to all outputs. A fused pair (FUSE) is LOP followed
by LIP, without an exchange of the values in between. The communication C is counted in elements of one sample.

The paper's N equal devices are generalised to any shares: only the number of workers beside the source (N - 1 in the
paper) and their total share ((N - 1) / N) matter.

The cost of a layer depends only on its own scheme and on whether the previous layer used LOP. Dynamic programming from
the last layer therefore yields the exact optimum of the paper's integer program, equations (11) to (13).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from testbed.common.errors import InputError
from testbed.ml.models.graph import Graph, GraphLayer
from testbed_stahl.plan import Scheme

Reuse = Literal["with-reuse", "equation-9"]
"""Elements that a layer receives after a layer divided by LOP. ``with-reuse``: only the elements that a device lacks,
which the program sends; for LIP this departs from Section 4.1. ``equation-9``: as printed, where only LOP after LOP has
this term, and equations (8) and (9) charge LIP and FUSE1 for their input."""


@dataclass(frozen=True)
class WorkerTotals:
    """Number and total share of the workers, as used in the formulas."""

    count: int
    """Number of workers that take part, without the source; N - 1 in the paper."""
    share: Fraction
    """Share of each layer that all workers together compute; (N - 1) / N in the paper."""

    @classmethod
    def of(cls, shares: Sequence[Fraction], source: int) -> WorkerTotals:
        """Return the totals of devices with these shares.

        >>> WorkerTotals.of([Fraction(1, 2), Fraction(1, 2), Fraction(0)], source=0)
        WorkerTotals(count=1, share=Fraction(1, 2))
        """
        count = 0
        for index, share in enumerate(shares):
            # A device without a share receives nothing.
            if index != source and share > 0:
                count += 1
        return cls(count, 1 - shares[source])

    @classmethod
    def equal(cls, devices: int) -> WorkerTotals:
        """Return the totals of N devices with equal shares, as in the paper.

        >>> WorkerTotals.equal(4)
        WorkerTotals(count=3, share=Fraction(3, 4))
        """
        return cls(devices - 1, Fraction(devices - 1, devices))


def layer_communication(
    layer: GraphLayer,
    scheme: Scheme,
    workers: WorkerTotals,
    holds_share: bool,
    reuse: Reuse = "with-reuse",
) -> Fraction:
    """Return the elements sent by a layer to the workers and back, by equations (7) to (9).

    ``holds_share``: each device already has its share of the input, since the previous layer used LOP and feeds this
    one directly.
    """
    # M_l (N - 1), M_l (N - 1) / N, K_l (N - 1) / N and K_l (N - 1) of the paper.
    whole_input = Fraction(layer.inputs * workers.count)
    input_shares = layer.inputs * workers.share
    output_shares = layer.outputs * workers.share
    whole_output = Fraction(layer.outputs * workers.count)
    # In the paper only LOP has a term for input that a device holds already. The paper's worked example does not charge
    # such input for FUSE1 after LOP either (Figure 7), and for LIP Section 4.1 sees no opportunity for reuse. The
    # program never sends such input, so that ``with-reuse`` for LIP after LOP is an extension of ours.
    saves_input = holds_share and (scheme == "lop" or reuse == "with-reuse")
    match scheme:
        case "lop":
            # Equation (7); its o_{l-1} is `holds_share`.
            saved = input_shares if saves_input else Fraction(0)
            return whole_input - saved + output_shares
        case "fuse1":
            # The outputs stay on the devices that made them.
            return whole_input - input_shares if saves_input else whole_input
        case "lip":
            # Equation (8).
            return whole_output if saves_input else input_shares + whole_output
        case "fuse2":
            # Each device has its inputs, the outputs of its part of fuse1.
            return whole_output
        case _:
            # C does not count layers on one device, nor tiles.
            return Fraction(0)


def holds_shares(graph: Graph, schemes: Sequence[Scheme], index: int) -> bool:
    """Return whether the devices hold their shares of a layer's input, given the schemes up to the layer."""
    return graph.follows(index) and schemes[index - 1] == "lop"


def total_communication(
    graph: Graph,
    schemes: Sequence[Scheme],
    workers: WorkerTotals,
    reuse: Reuse = "with-reuse",
) -> Fraction:
    """Return C of a whole network, in elements: equation (10). Layers ``whole`` and ``tiled`` add nothing to C.

    The paper's worked example, four fully connected layers of 4-8-16-4-4 on two devices, with LOP everywhere:

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> int(total_communication(graph, ["lop"] * 4, WorkerTotals.equal(2)))
    34
    """
    total = Fraction(0)
    pairs = zip(graph.layers, schemes, strict=True)
    for index, (layer, scheme) in enumerate(pairs):
        holds_share = holds_shares(graph, schemes, index)
        total += layer_communication(layer, scheme, workers, holds_share, reuse)
    return total


Schemes = tuple[Scheme, ...]
"""The scheme of each layer."""
LayerPair = tuple[int, int]
"""Indices of two successive layers."""


def uniform_schemes(graph: Graph, scheme: Scheme, first: int = 0) -> Schemes:
    """Return one scheme for all divisible layers from layer ``first`` on; earlier layers are tiled."""
    schemes: list[Scheme] = []
    for index, layer in enumerate(graph.layers):
        if index < first:
            schemes.append("tiled")
        elif layer.splits:
            schemes.append(scheme)
        else:
            schemes.append("whole")
    return tuple(schemes)


def fused_schemes(
    graph: Graph, pairs: Collection[LayerPair], first: int = 0
) -> Schemes:
    """Return LOP with the given pairs of layers fused; raises `InputError` with the valid pairs for any other pair.

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> fused_schemes(graph, [(1, 2)])
    ('lop', 'fuse1', 'fuse2', 'lop')
    """
    schemes = list(uniform_schemes(graph, "lop", first))
    for one, other in pairs:
        is_successive = other == one + 1 and one >= first
        is_fusible = is_successive and graph.fuses(one)
        # A layer of an earlier pair has the scheme fuse1 or fuse2 by now.
        if not is_fusible or {schemes[one], schemes[other]} != {"lop"}:
            raise InputError(
                f"layers {one} and {other} of {graph.name} cannot be fused: a pair is two successive layers with "
                "weights, in no other pair, whose intermediate output no other layer reads; "
                f"choose from {_valid_pairs(graph, first)}",
                ("method", "fused_pairs"),
            )
        schemes[one] = "fuse1"
        schemes[other] = "fuse2"
    return tuple(schemes)


def _valid_pairs(graph: Graph, first: int) -> str:
    pairs = []
    for index in range(first, len(graph.layers)):
        if graph.fuses(index):
            pairs.append(f"{index}+{index + 1}")
    return ", ".join(pairs) or "none: this network has no such pair"


def least_communication(
    graph: Graph,
    workers: WorkerTotals,
    reuse: Reuse = "with-reuse",
    first: int = 0,
    lip: bool = True,
) -> Schemes:
    """Return the schemes with the minimum C from layer ``first`` on; ties prefer LOP, then LIP, then FUSE.

    Without ``lip`` only LOP and fused pairs are considered, as in the variants of the paper's Table 2. The optimum of
    the paper's worked example:

    >>> from testbed.ml.models import create
    >>> from testbed.ml.models.graph import graph_of
    >>> graph = graph_of(create("mlp", {"hidden": [8, 16, 4]}, (1, 2, 2), 4))
    >>> least_communication(graph, WorkerTotals.equal(2))
    ('lop', 'fuse1', 'fuse2', 'lop')
    """
    count = len(graph.layers)
    # best[index][after_lop]: the minimum C of layer ``index`` and all later layers together, and their schemes. The
    # second index is whether the previous layer used LOP.
    best: dict[int, dict[bool, tuple[Fraction, Schemes]]] = {
        count: dict.fromkeys((False, True), (Fraction(0), ()))
    }
    for index in reversed(range(first, count)):
        best[index] = {}
        for after_lop in (False, True):
            holds_share = after_lop and graph.follows(index)
            options = []
            for schemes in _possible_schemes(graph, index, lip):
                ends_with_lop = schemes[-1] == "lop"
                cost, later = best[index + len(schemes)][ends_with_lop]
                for offset, scheme in enumerate(schemes):
                    cost += layer_communication(
                        graph.layers[index + offset],
                        scheme,
                        workers,
                        holds_share and offset == 0,
                        reuse,
                    )
                options.append((cost, (*schemes, *later)))
            # `min` returns the first of equal costs, so the order of the possible schemes decides ties.
            best[index][after_lop] = min(options, key=lambda option: option[0])
    tiled = uniform_schemes(graph, "lop", first)[:first]
    # The source alone has the image, or the map of all tiles, so no device holds a share of the first input.
    _, divided = best[first][False]
    return (*tiled, *divided)


def _possible_schemes(graph: Graph, index: int, lip: bool) -> list[Schemes]:
    """Return the possible schemes of a layer alone, then the schemes of the layer fused with the next one.

    Constraints (11) to (13): each layer has one scheme, and the second layer of a fused pair follows the first one.
    """
    if not graph.layers[index].splits:
        return [("whole",)]
    possible: list[Schemes] = [("lop",)]
    if lip:
        possible.append(("lip",))
    if graph.fuses(index):
        possible.append(("fuse1", "fuse2"))
    return possible


def pairs_of(schemes: Sequence[Scheme]) -> tuple[LayerPair, ...]:
    """Return the fused pairs among the schemes.

    >>> pairs_of(["lop", "fuse1", "fuse2", "lop"])
    ((1, 2),)
    """
    pairs = []
    for index, scheme in enumerate(schemes):
        if scheme == "fuse1":
            pairs.append((index, index + 1))
    return tuple(pairs)
