"""Weights to begin with, from a file: safetensors as a run leaves them, or Darknet's.

The first bytes show which of the two a file is: in a safetensors file the length of a header, then a brace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testbed.common.errors import InputError
from testbed.common.lazy import torch
from testbed.models import darknet
from testbed.models.chain import Model

_COUNTER = ".num_batches_tracked"
"""A counter of a normalisation, of no use after training: not every run leaves it."""
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
    _compare(path, weights, model)
    return weights


def _compare(path: Path, weights: Mapping[str, torch.Tensor], model: Model) -> None:
    """Raise `InputError` where weights are not this model's, or hold what no trained network does."""
    # Where a tensor has no values, no time goes into drawing any.
    with torch.device("meta"):
        wanted = model.build(0, len(model.units), 0).state_dict()
    names = {name for name in wanted if not name.endswith(_COUNTER)}
    found = {name for name in weights if not name.endswith(_COUNTER)}
    other = f"{path}: not the weights of {model.name} as the scenario has it"
    help_ = "use those of this model with its options, for as many classes"
    if names != found:
        missing, more = sorted(names - found), sorted(found - names)
        what = f"there is no {missing[0]}" if missing else f"{more[0]} is none of its tensors"
        raise InputError(f"{other}: {what}; {help_}")
    for name in sorted(names):
        if weights[name].shape != wanted[name].shape or weights[name].dtype != wanted[name].dtype:
            is_, should = (f"{each.dtype} of {list(each.shape)}" for each in (weights[name], wanted[name]))
            raise InputError(f"{other}: {name} is {is_} instead of {should}; {help_}")
        if not weights[name].isfinite().all():
            raise InputError(f"{path}: {name} holds values that are no numbers: whatever left them has diverged")


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
