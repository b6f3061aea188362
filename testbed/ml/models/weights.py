"""Initial weights from a file: a `state_dict` as safetensors or of `torch.save`, or Darknet's weights.

Files of a user's network have the names of its own `state_dict`. Within a run each name is prefixed by the unit's index
(`Model.build`); files of earlier versions have the prefix and are read as well.
"""

from __future__ import annotations

import hashlib
import mmap
import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from testbed.common.errors import InputError
from testbed.ml import arrays
from testbed.ml.lazy import nn, torch
from testbed.ml.models import darknet
from testbed.ml.models.chain import Model
from testbed.wire import tensors

State = Mapping[str, "torch.Tensor"]
_COUNTER = ".num_batches_tracked"
"""A counter of a normalisation, unused after training and missing in some files."""
_BRACE = 8
"""Position of the first brace in a safetensors file, after the length of its header."""
_TORCH = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of torch.save files: a zip archive, or a pickle in old versions."""
_PREFIXES = ("module.", "_orig_mod.", "model.", "network.")
"""Prefixes added to names by network wrappers: DataParallel, torch.compile, trainers."""
_NESTED = ("state_dict", "model_state_dict", "model")
"""Keys under which a checkpoint of a training loop holds the `state_dict`."""
_MOST_NAMES = 5
"""Maximum names listed in a message."""


def check(path: Path, model: Model) -> None:
    """Raise `InputError` for a missing or unsuitable file; only names, shapes and types are compared."""
    if not path.is_file():
        raise InputError(f"{path} not found: paths are relative to the scenario file")
    if _detect_format(path) == "darknet":
        darknet.check(path, model)
    else:
        _match_names(path, _load_tensors(path, values=False), model)


def is_scenario(path: Path) -> bool:
    """Return whether a file is a scenario whose run produces the weights."""
    return path.suffix in (".yaml", ".yml")


def read(path: Path, model: Model) -> dict[str, torch.Tensor]:
    """Return a file's weights, keyed as in `Model.build`; raises `InputError` naming the problem."""
    if not path.is_file() or _detect_format(path) == "darknet":
        # Raises for a missing file.
        check(path, model)
        return darknet.read(path, model)
    tensors = _match_names(path, _load_tensors(path), model)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise InputError(
                f"{path}: {name} contains values that are not finite numbers: the training that wrote the file diverged"
            )
    return tensors


def export_state(state: State, model: Model, seed: int) -> dict[str, torch.Tensor]:
    """Return a state keyed as in `Model.build` as the `state_dict` of the user's own network.

    Tensors used by no unit have the initial values of ``seed``; tensors added by a method keep their names.
    """
    assert model.builder is not None
    network = model.builder.network(seed)
    own_names = network.state_dict().keys()
    own = {}
    added = {}
    for name, tensor in state.items():
        own_name = plain_name(name)
        if own_name in own_names:
            own[own_name] = tensor
        else:
            added[name] = tensor
    # Not strict, since tensors that no unit uses are missing.
    network.load_state_dict(own, strict=False)
    return network.state_dict() | added


def plain_name(name: str) -> str:
    """Return a name without the index of its unit.

    >>> plain_name("3.head.weight")
    'head.weight'
    """
    return name.partition(".")[2]


def _load_tensors(path: Path, *, values: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; without ``values``, safetensors files yield names, shapes and types alone."""
    if _detect_format(path) == "torch":
        return _unwrap_checkpoint(path, _load_pickle(path))
    try:
        if values:
            from safetensors.torch import load_file

            return dict(load_file(path))
        return _read_header(path)
    except (ValueError, OSError, BufferError) as error:
        raise InputError(
            f"{path}: not a safetensors file ({error}); a run writes one as weights.safetensors"
        ) from None


def _read_header(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file without values: a check of gigabytes then reads some kilobytes."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _empty_tensors(content)


def _empty_tensors(content: mmap.mmap) -> dict[str, torch.Tensor]:
    # A function of its own, whose views end with it: a file cannot be unmapped while there are views of it.
    raw_tensors, _ = tensors.read(memoryview(content))
    return {raw.name: arrays.empty(raw) for raw in raw_tensors}


def _load_pickle(path: Path) -> object:
    """Return the content of a file of `torch.save`; raises `InputError` for objects other than tensors."""
    try:
        with path.open("rb") as file:
            is_archive = file.read(4) == _TORCH[0]
        # weights_only: any other pickle runs code of whoever wrote it. Only archives can be mapped into memory.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        # torch's messages have many lines of advice for programmers.
        reason, _, _ = str(error).strip().partition("\n")
        text = "contains other objects than tensors, or is damaged: save only the `state_dict()` of the network"
        raise InputError(f"{path}: {text} ({reason[:200]})") from None


def _unwrap_checkpoint(path: Path, content: object) -> dict[str, torch.Tensor]:
    """Return the `state_dict` in a file of torch, also inside a checkpoint with more content."""
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not _is_state(content):
        raise InputError(
            f"{path}: contains no `state_dict`: write it with torch.save(net.state_dict(), ...)"
        )
    return {str(name): tensor for name, tensor in content.items()}


def _is_state(content: object) -> TypeGuard[Mapping[Any, torch.Tensor]]:
    """Return whether the content of a file is a mapping of tensors, as a `state_dict` is."""
    if not isinstance(content, Mapping):
        return False
    return all(isinstance(value, torch.Tensor) for value in content.values())


def _match_names(path: Path, tensors: State, model: Model) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by the names of `Model.build`; raises `InputError` for a mismatch."""
    from testbed.ml.models.lora import is_adapter

    # Any seed: the values are replaced.
    wanted = _state_shapes(lambda: model.build(0, len(model.units), seed=0))
    names, known = _names_in_file(wanted, tensors, model)
    tensors = _without_prefixes(tensors, known)
    other = f"{path}: not the weights of {model.name} with the options of the scenario"
    remedy = "use weights of this model with the same options and number of classes"
    # A file of the network without adapters suffices.
    adapters = {name for name in names.values() if is_adapter(name)}
    missing = _without_counters(names.values()) - tensors.keys() - adapters
    if missing:
        raise InputError(f"{other}: missing {_list_names(missing)}; {remedy}")
    unknown = _without_counters(tensors) - known
    if unknown:
        raise InputError(
            f"{other}: {_list_names(unknown)} does not belong to the model; {remedy}"
        )
    result = {}
    for name, empty in wanted.items():
        own_name = names[name]
        given = tensors.get(own_name)
        if given is None:
            given = _missing_values(own_name, empty)
        if given.shape != empty.shape or given.dtype != empty.dtype:
            actual = _type_and_shape(given)
            needed = _type_and_shape(empty)
            raise InputError(
                f"{other}: {own_name} is {actual} instead of {needed}; {remedy}"
            )
        result[name] = given
    return result


def _names_in_file(
    wanted: State, tensors: State, model: Model
) -> tuple[dict[str, str], set[str]]:
    """Return the name in the file for each name of `Model.build`, and all permitted names of the file.

    ``wanted`` is the state of the model, ``tensors`` that of the file.
    """
    # Files of a user's network by earlier versions have the units' indices in the names, as the model has.
    has_indices = _without_counters(tensors) == _without_counters(wanted)
    builder = model.builder
    if builder is None or has_indices:
        unchanged = {name: name for name in wanted}
        return unchanged, set(wanted)
    network = _state_shapes(lambda: builder.network(0))
    names = {name: plain_name(name) for name in wanted}
    # The network may have tensors that no unit uses.
    known = {*names.values(), *network}
    return names, known


def _missing_values(name: str, empty: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor that a file may lack."""
    from testbed.ml.models.lora import first_values, is_adapter

    if is_adapter(name):
        # The file is that of the network without adapters.
        return first_values(name, empty)
    # A counter of a normalisation.
    return torch.zeros(empty.shape, dtype=empty.dtype)


def _type_and_shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {list(tensor.shape)}"


def _state_shapes(make: Callable[[], nn.Module]) -> State:
    """Return the state of a module; tensors without values are not drawn."""
    try:
        with torch.device("meta"):
            module = make()
    except (RuntimeError, NotImplementedError):
        # The network reads values while it is constructed.
        module = make()
    return module.state_dict()


def _without_prefixes(tensors: State, known: Collection[str]) -> State:
    """Return tensors without the prefixes of wrappers."""
    # Wrappers may be nested, each with a prefix of its own.
    while known and tensors:
        prefix = _common_prefix(tensors)
        # The network's own names may begin with a module of such a name.
        if prefix is None or _all_begin(known, prefix):
            break
        without_prefix = {}
        for name, tensor in tensors.items():
            without_prefix[name.removeprefix(prefix)] = tensor
        tensors = without_prefix
    renamed = {}
    for name, tensor in tensors.items():
        # torch.compile of single layers puts its prefix into the middle of names.
        own_name = name if name in known else name.replace("_orig_mod.", "")
        renamed[own_name] = tensor
    return renamed


def _common_prefix(names: Collection[str]) -> str | None:
    """Return the prefix of a wrapper with which all names begin; None without one."""
    for prefix in _PREFIXES:
        if _all_begin(names, prefix):
            return prefix
    return None


def _all_begin(names: Collection[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _without_counters(names: Collection[str]) -> set[str]:
    return {name for name in names if not name.endswith(_COUNTER)}


def _list_names(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:_MOST_NAMES])
    others = len(names) - _MOST_NAMES
    return f"{first} (and {others} more)" if others > 0 else first


def facts(path: Path, model: Model) -> dict[str, Any]:
    """Return the identification of a weights file as plain values."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
    if is_scenario(path):
        return {"format": "scenario", **known}
    kind = _detect_format(path)
    if kind != "darknet":
        return {"format": kind, **known}
    header = darknet.check(path, model)
    version = ".".join(map(str, header.version))
    return {
        "format": f"darknet {version}",
        **known,
        "images_seen": header.seen,
    }


def _detect_format(path: Path) -> Literal["safetensors", "torch", "darknet"]:
    """Return the format shown by a file's first bytes: safetensors begins with a header length and a brace."""
    try:
        with path.open("rb") as file:
            begin = file.read(_BRACE + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if begin[_BRACE:] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    return "torch" if begin.startswith(_TORCH) else "darknet"
