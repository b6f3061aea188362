"""Shards of a layer over several devices: which heads and which hidden columns each one holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.common.errors import InputError
from testbed_generation.architecture import Architecture


@dataclass(frozen=True)
class Shard:
    """A device's part of each layer: key-value heads with their query heads, and hidden columns."""

    first_head: int
    """First key-value head."""
    last_head: int
    """The key-value head after the last one."""
    first_column: int
    last_column: int

    def rows(self, name: str, architecture: Architecture) -> tuple[int, slice]:
        """Return the axis along which a weight is cut, and the shard's indices on this axis.

        Axis -1 means that every shard has the whole weight: a vector. ``name`` is the short name of a weight, such as
        ``self_attn.q_proj``.

        >>> from testbed_generation.architecture import preset
        >>> Shard(0, 2, 0, 1000).rows("self_attn.k_proj", preset("llama-3-8b"))
        (0, slice(0, 256, None))
        """
        width = architecture.values_per_head
        # Query heads that share a key-value head stay together with it.
        group = architecture.heads // architecture.kv_heads * width
        queries = slice(self.first_head * group, self.last_head * group)
        keys = slice(self.first_head * width, self.last_head * width)
        columns = slice(self.first_column, self.last_column)
        # Matrices that make heads or hidden columns are cut by rows, and those that read them by columns. The products
        # of all shards then add up to that of the layer, with one sum for each half (Shoeybi et al., 2019).
        cuts: Mapping[str, tuple[int, slice]] = {
            "self_attn.q_proj": (0, queries),
            "self_attn.k_proj": (0, keys),
            "self_attn.v_proj": (0, keys),
            "self_attn.o_proj": (1, queries),
            "mlp.gate_proj": (0, columns),
            "mlp.up_proj": (0, columns),
            "mlp.down_proj": (1, columns),
        }
        return cuts.get(name, (-1, slice(None)))

    def parameters(self, architecture: Architecture) -> int:
        """Return the number of values in the shard's matrices of one layer.

        >>> from testbed_generation.architecture import preset
        >>> llama = preset("llama-3-8b")
        >>> Shard(0, 4, 0, 7168).parameters(llama) / llama.layer_values
        0.5
        """
        attention = architecture.attention_values * self.heads // architecture.kv_heads
        experts = max(1, architecture.experts) * architecture.expert_values
        columns = experts * self.columns // architecture.hidden
        # Every shard scores the experts of a token itself, so the router is not cut.
        return attention + columns + architecture.router_values

    @property
    def heads(self) -> int:
        """Number of key-value heads of the shard."""
        return self.last_head - self.first_head

    @property
    def columns(self) -> int:
        """Number of hidden columns of the shard."""
        return self.last_column - self.first_column


def divide_layer(
    architecture: Architecture, shares: Sequence[float]
) -> tuple[Shard, ...]:
    """Divide a layer over devices in proportion to their shares; each gets at least one key-value head.

    Raises `InputError` where there are more devices than key-value heads.

    >>> from testbed_generation.architecture import preset
    >>> [shard.heads for shard in divide_layer(preset("llama-3-8b"), (1, 1, 2))]
    [2, 2, 4]
    """
    heads = apportion(architecture.kv_heads, shares, "key-value heads")
    columns = apportion(architecture.hidden, shares, "hidden columns")
    shards = []
    head = column = 0
    for own_heads, own_columns in zip(heads, columns, strict=True):
        shards.append(Shard(head, head + own_heads, column, column + own_columns))
        head += own_heads
        column += own_columns
    return tuple(shards)


def apportion(total: int, shares: Sequence[float], what: str) -> tuple[int, ...]:
    """Divide a total into whole numbers of at least one each, as nearly in proportion to shares as possible.

    ``what`` names the divided things in the `InputError` that is raised for more shares than things.

    Example:
        >>> apportion(8, (1.0, 1.0, 2.0), "heads")
        (2, 2, 4)
    """
    if len(shares) > total:
        raise InputError(
            f"{total} {what} do not divide over {len(shares)} devices: use at most {total} devices"
        )
    exact = [max(1.0, total * share / sum(shares)) for share in shares]
    parts = [int(part) for part in exact]

    def deficit(index: int) -> float:
        return exact[index] - parts[index]

    # Rounding down leaves some; `max` gives equal deficits to the first device, so the result is always the same.
    while sum(parts) < total:
        parts[max(range(len(parts)), key=deficit)] += 1
    # Parts that were raised to 1 may add up to more than the total: the others then give some back.
    while sum(parts) > total:
        reducible = [index for index, part in enumerate(parts) if part > 1]
        parts[min(reducible, key=deficit)] -= 1
    return tuple(parts)


def check_rows(architecture: Architecture, devices: int, block: int) -> None:
    """Raise `InputError` where the rows of a matrix do not divide over devices in blocks of ``block`` rows.

    ``block`` is the number of values that are packed together for transport; 1 if each travels by itself.
    """
    matrices = {
        "query": architecture.query_values,
        "key": architecture.kv_values,
        "output": architecture.width,
        "hidden": architecture.hidden,
    }
    for name, rows in matrices.items():
        if rows % (devices * block):
            raise InputError(
                f"{rows} {name} rows do not divide over {devices} devices in blocks of {block}: use another number of "
                "devices, or 'dataflow: all-reduce'",
                ("workload", "method", "dataflow"),
            )
