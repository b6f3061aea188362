"""Weights to begin with, from a file: safetensors as a run leaves them, or Darknet's.

Which of the two a file is, its first bytes tell: in a safetensors file the length of a header, then a brace.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.errors import InputError
from testbed.models import darknet
from testbed.models.chain import Model

if TYPE_CHECKING:
    import torch

_BRACE = 8
"""Where a safetensors file has its first brace."""


def check(path: Path, model: Model) -> None:
    """Raise `InputError` where a file is not there or is plainly not this model's; reads no weights, needs no torch."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: name one, relative to the scenario file")
    if not _is_safetensors(path):
        darknet.check(path, model)


def is_scenario(path: Path) -> bool:
    """Say whether a file is a scenario, whose run leaves the weights, instead of weights."""
    return path.suffix in (".yaml", ".yml")


def read(path: Path, model: Model) -> dict[str, torch.Tensor]:
    """Return a file's weights, keyed as `Model.build` names them; raises `InputError` saying what is wrong with it."""
    check(path, model)
    if not _is_safetensors(path):
        return darknet.read(path, model)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path}: not a safetensors file ({error}); a run leaves one as weights.safetensors") from None
    return weights


def facts(path: Path, model: Model) -> dict[str, Any]:
    """Return what identifies a file of weights, as plain values."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
    if is_scenario(path):
        return {"format": "scenario", **known}
    if _is_safetensors(path):
        return {"format": "safetensors", **known}
    header = darknet.check(path, model)
    return {"format": f"darknet {'.'.join(map(str, header.version))}", **known, "images_seen": header.seen}


def _is_safetensors(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(_BRACE + 1)[_BRACE:] == b"{"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
