"""Division of layers by heads and hidden columns, or by rows, for tensor parallelism.

A hidden column is one hidden activation of the feed-forward network with its weights. `divide_layer` gives each device
a `Shard` of all layers; `check_row_division` is for methods that divide each matrix into equal numbers of rows.
"""

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

    def weight_indices(
        self, name: str, architecture: Architecture
    ) -> tuple[slice, ...]:
        """Return the shard's indices of a weight, for each axis of the weight.

        ``name`` is the short name of the weight, such as ``self_attn.q_proj``. Every shard has the whole of a vector.

        >>> from testbed_generation.architecture import preset
        >>> Shard(0, 2, 0, 1000).weight_indices("self_attn.k_proj", preset("llama-3-8b"))
        (slice(0, 256, None), slice(None, None, None))
        """
        head_values = architecture.values_per_head
        # Query heads that share a key-value head stay together with it.
        group_values = architecture.heads // architecture.kv_heads * head_values
        queries = slice(self.head_start * group_values, self.head_stop * group_values)
        keys = slice(self.head_start * head_values, self.head_stop * head_values)
        columns = slice(self.column_start, self.column_stop)
        whole = slice(None)
        # Axis 0 of a matrix is its outputs, axis 1 its inputs. Matrices whose outputs are heads or hidden columns are
        # divided along axis 0, and matrices with these inputs along axis 1. The outputs of all shards then add up to
        # the output of the layer, with one sum for each half of a layer (Shoeybi et al., 2019).
        indices: Mapping[str, tuple[slice, ...]] = {
            "self_attn.q_proj": (queries, whole),
            "self_attn.k_proj": (keys, whole),
            "self_attn.v_proj": (keys, whole),
            "self_attn.o_proj": (whole, queries),
            "mlp.gate_proj": (columns, whole),
            "mlp.up_proj": (columns, whole),
            "mlp.down_proj": (whole, columns),
        }
        return indices.get(name, (whole,))

    def parameters(self, architecture: Architecture) -> int:
        """Return the number of values in the shard's matrices of one layer.

        >>> from testbed_generation.architecture import preset
        >>> llama = preset("llama-3-8b")
        >>> Shard(0, 4, 0, 7168).parameters(llama) / llama.layer_values
        0.5
        """
        attention = architecture.attention_values * self.heads // architecture.kv_heads
        all_experts = max(1, architecture.experts) * architecture.expert_values
        feed_forward = all_experts * self.columns // architecture.hidden
        # Every shard scores the experts of a token itself, so every shard has the whole router.
        return attention + feed_forward + architecture.router_values

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
    head_counts = apportion(architecture.kv_heads, shares, "key-value heads")
    column_counts = apportion(architecture.hidden, shares, "hidden columns")
    shards = []
    head = 0
    column = 0
    for heads, columns in zip(head_counts, column_counts, strict=True):
        shard = Shard(
            head_start=head,
            head_stop=head + heads,
            column_start=column,
            column_stop=column + columns,
        )
        shards.append(shard)
        head = shard.head_stop
        column = shard.column_stop
    return tuple(shards)


def apportion(total: int, shares: Sequence[float], noun: str) -> tuple[int, ...]:
    """Divide a total into whole numbers of at least one each, as nearly in proportion to shares as possible.

    Raises `InputError` if the total is smaller than the number of shares; ``noun`` names in its message what is
    divided.

    Example:
        >>> apportion(8, (1.0, 1.0, 2.0), "heads")
        (2, 2, 4)
    """
    if len(shares) > total:
        raise InputError(
            f"{total} {noun} do not divide over {len(shares)} devices: use at most {total} devices"
        )
    exact_parts = [max(1.0, total * share / sum(shares)) for share in shares]
    parts = [int(part) for part in exact_parts]

    def deficit(index: int) -> float:
        return exact_parts[index] - parts[index]

    # Rounding down leaves a remainder for the parts with the largest deficits. Of equal deficits `max` returns the
    # first, so the result is deterministic.
    while sum(parts) < total:
        index = max(range(len(parts)), key=deficit)
        parts[index] += 1
    # Parts that were raised to 1 may add up to more than the total; then larger parts are reduced.
    while sum(parts) > total:
        reducible = [index for index, part in enumerate(parts) if part > 1]
        index = min(reducible, key=deficit)
        parts[index] -= 1
    return tuple(parts)


def check_row_division(architecture: Architecture, devices: int, block: int) -> None:
    """Raise `InputError` if the rows of a matrix do not divide over devices in blocks of ``block`` rows.

    ``block`` is the number of values that are packed together for transport; 1 if each value is packed by itself.
    """
    rows_by_matrix = {
        "query": architecture.query_values,
        "key": architecture.kv_values,
        "output": architecture.width,
        "hidden": architecture.hidden,
    }
    for name, rows in rows_by_matrix.items():
        if rows % (devices * block):
            raise InputError(
                f"{rows} {name} rows do not divide over {devices} devices in blocks of {block}: use another number of "
                "devices, or 'dataflow: all-reduce'",
                ("workload", "method", "dataflow"),
            )
