"""Shards of a layer: the heads and the hidden columns that each device holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from testbed.common.errors import InputError
from testbed_generation.architecture import Architecture


@dataclass(frozen=True)
class Shard:
    """A device's part of each layer: key-value heads with their query heads, and hidden columns."""

    head_start: int
    """First key-value head."""
    head_stop: int
    """The key-value head after the last one."""
    column_start: int
    """First hidden column."""
    column_stop: int
    """The hidden column after the last one."""

    def weight_slice(self, name: str, architecture: Architecture) -> tuple[int, slice]:
        """Return the axis along which a weight is cut, and the shard's indices on this axis.

        Axis -1 means that every shard has the whole weight: a vector. ``name`` is the short name of a weight, such as
        ``self_attn.q_proj``.

        >>> from testbed_generation.architecture import preset
        >>> Shard(0, 2, 0, 1000).weight_slice("self_attn.k_proj", preset("llama-3-8b"))
        (0, slice(0, 256, None))
        """
        width = architecture.values_per_head
        # Query heads that share a key-value head stay together with it.
        group = architecture.heads // architecture.kv_heads * width
        queries = slice(self.head_start * group, self.head_stop * group)
        keys = slice(self.head_start * width, self.head_stop * width)
        columns = slice(self.column_start, self.column_stop)
        # Matrices whose outputs are heads or hidden columns are cut by rows, and matrices whose inputs they are by
        # columns. The outputs of all shards then add up to the output of the layer, with one sum for each half of a
        # layer (Shoeybi et al., 2019).
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
        return self.head_stop - self.head_start

    @property
    def columns(self) -> int:
        """Number of hidden columns of the shard."""
        return self.column_stop - self.column_start


def divide_layer(
    architecture: Architecture, shares: Sequence[float]
) -> tuple[Shard, ...]:
    """Divide a layer over devices in proportion to their shares; each gets at least one key-value head.

    Raises `InputError` if there are more devices than key-value heads.

    >>> from testbed_generation.architecture import preset
    >>> [shard.heads for shard in divide_layer(preset("llama-3-8b"), (1, 1, 2))]
    [2, 2, 4]
    """
    heads = apportion(architecture.kv_heads, shares, "key-value heads")
    columns = apportion(architecture.hidden, shares, "hidden columns")
    shards = []
    head = column = 0
    for head_count, column_count in zip(heads, columns, strict=True):
        next_head, next_column = head + head_count, column + column_count
        shards.append(Shard(head, next_head, column, next_column))
        head, column = next_head, next_column
    return tuple(shards)


def apportion(total: int, shares: Sequence[float], noun: str) -> tuple[int, ...]:
    """Divide a total into whole numbers of at least one each, as nearly in proportion to shares as possible.

    Raises `InputError` if there are more shares than things to divide; ``noun`` names the things in its message.

    Example:
        >>> apportion(8, (1.0, 1.0, 2.0), "heads")
        (2, 2, 4)
    """
    if len(shares) > total:
        raise InputError(
            f"{total} {noun} do not divide over {len(shares)} devices: use at most {total} devices"
        )
    exact = [max(1.0, total * share / sum(shares)) for share in shares]
    parts = [int(part) for part in exact]

    def deficit(index: int) -> float:
        return exact[index] - parts[index]

    # Rounding down leaves a remainder. Of equal deficits `max` returns the first, so the result is deterministic.
    while sum(parts) < total:
        largest_deficit = max(range(len(parts)), key=deficit)
        parts[largest_deficit] += 1
    # Parts that were raised to 1 may add up to more than the total; then larger parts are reduced.
    while sum(parts) > total:
        reducible = [index for index, part in enumerate(parts) if part > 1]
        smallest_deficit = min(reducible, key=deficit)
        parts[smallest_deficit] -= 1
    return tuple(parts)


def check_row_division(architecture: Architecture, devices: int, block: int) -> None:
    """Raise `InputError` if the rows of a matrix do not divide over devices in blocks of ``block`` rows.

    ``block`` is the number of values that are packed together for transport; 1 if each value is packed by itself.
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
