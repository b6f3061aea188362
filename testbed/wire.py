"""Messages between devices, and their form on the wire (see ``encode``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Message:
    """What one device tells another.

    ``fields`` hold small JSON values; ``tensors`` travel as safetensors. ``sender`` is set by whoever delivers
    the message, never trusted from its maker. ``padding`` is a number of bytes charged beside the content, for
    programs that study timing without tensors.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sender: str = ""
    padding: int = 0

    def __getitem__(self, key: str) -> Any:
        """Return one of the fields."""
        return self.fields[key]
