"""Initial weights from a file: a `state_dict` as safetensors or of `torch.save`, or Darknet's weights.

In a run, tensors have the names of `Model.build`, which begin with the index of their unit: "3.head.weight". Files of a
catalogue model have these names as well. Files of a user's network have the names of the network's own `state_dict`,
without the index; files that earlier versions of the testbed wrote have the index, and are read as well.
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
"""Tensors by name."""
_COUNTER = ".num_batches_tracked"
"""End of the name of a normalisation's counter, which is unused after training and missing in some files."""
_BRACE_OFFSET = 8
"""Position in bytes of the first brace in a safetensors file, after the length of the header."""
_ARCHIVE = b"PK\x03\x04"
"""First bytes of a file of `torch.save`: a zip archive."""
_OLD_PICKLE = b"\x80\x02"
"""First bytes of a file of `torch.save` in old versions: a pickle."""
_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "model.", "network.")
"""Prefixes that wrappers add to the names of a network's tensors: DataParallel, torch.compile, trainers."""
_CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys at which checkpoints of training loops contain the `state_dict`."""
_MAX_NAMES = 5
"""Maximum number of names listed in a message."""


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
    """Return a file's weights by their names in `Model.build`; raises `InputError` naming the problem."""
    if not path.is_file() or _detect_format(path) == "darknet":
        # Raises `InputError` for a missing file.
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
    """Return ``state``, which has the names of `Model.build`, as the `state_dict` of the user's network.

    The network's tensors that no unit uses have the initial values of ``seed``. Tensors that a method added to the
    model keep their names.
    """
    assert model.builder is not None
    network = model.builder.network(seed)
    network_names = network.state_dict().keys()
    network_state = {}
    added_tensors = {}
    for name, tensor in state.items():
        network_name = plain_name(name)
        if network_name in network_names:
            network_state[network_name] = tensor
        else:
            added_tensors[name] = tensor
    # Not strict, since tensors that no unit uses are missing.
    network.load_state_dict(network_state, strict=False)
    return network.state_dict() | added_tensors


def plain_name(name: str) -> str:
    """Return a name of `Model.build` without the index of the unit: the name in the user's network.

    >>> plain_name("3.head.weight")
    'head.weight'
    """
    return name.partition(".")[2]


def _load_tensors(path: Path, *, values: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name.

    Without ``values``, tensors of a safetensors file have no values, only shape and type.
    """
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
    """Return the tensors of a safetensors file without values, so that a check reads kilobytes of gigabytes."""
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _empty_tensors(content)


def _empty_tensors(content: mmap.mmap) -> dict[str, torch.Tensor]:
    # A separate function, at whose end all views of the file are gone: with a view, the file could not be unmapped.
    raw_tensors, _ = tensors.read(memoryview(content))
    return {raw.name: arrays.empty(raw) for raw in raw_tensors}


def _load_pickle(path: Path) -> object:
    """Return the content of a file of `torch.save`; raises `InputError` for objects other than tensors."""
    try:
        with path.open("rb") as file:
            is_archive = file.read(len(_ARCHIVE)) == _ARCHIVE
        # weights_only: otherwise a pickle may run code of whoever wrote it. Only archives can be mapped into memory.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        # torch's messages have many lines of advice for programmers, and long lines.
        reason, _, _ = str(error).strip().partition("\n")
        text = "contains other objects than tensors, or is damaged: save only the `state_dict()` of the network"
        raise InputError(f"{path}: {text} ({reason[:200]})") from None


def _unwrap_checkpoint(path: Path, content: object) -> dict[str, torch.Tensor]:
    """Return the `state_dict` in the content of a file, which is a `state_dict` or a checkpoint containing one."""
    for key in _CHECKPOINT_KEYS:
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
    """Return the tensors of a file by the names of `Model.build`; raises `InputError` for a mismatch.

    ``tensors`` are by their names in the file.
    """
    from testbed.ml.models.lora import is_adapter

    # Any seed: the values are replaced.
    model_state = _state_shapes(lambda: model.build(0, len(model.units), seed=0))
    file_names, allowed_names = _names_in_file(model_state, tensors, model)
    tensors = _without_prefixes(tensors, allowed_names)
    problem = (
        f"{path}: not the weights of {model.name} with the options of the scenario"
    )
    remedy = "use weights of this model with the same options and number of classes"
    # A file may lack all adapters, and is then one of the network without adapters.
    adapters = {name for name in file_names.values() if is_adapter(name)}
    required_names = _without_counters(file_names.values()) - adapters
    missing = required_names - tensors.keys()
    if missing:
        raise InputError(f"{problem}: missing {_list_names(missing)}; {remedy}")
    unknown = _without_counters(tensors) - allowed_names
    if unknown:
        raise InputError(
            f"{problem}: {_list_names(unknown)} does not belong to the model; {remedy}"
        )
    result = {}
    for name, model_tensor in model_state.items():
        file_name = file_names[name]
        tensor = tensors.get(file_name)
        if tensor is None:
            tensor = _missing_tensor(file_name, model_tensor)
        is_same_type = tensor.dtype == model_tensor.dtype
        if tensor.shape != model_tensor.shape or not is_same_type:
            actual = _type_and_shape(tensor)
            expected = _type_and_shape(model_tensor)
            raise InputError(
                f"{problem}: {file_name} is {actual} instead of {expected}; {remedy}"
            )
        result[name] = tensor
    return result


def _names_in_file(
    model_state: State, tensors: State, model: Model
) -> tuple[dict[str, str], set[str]]:
    """Return the name in the file for each name of `Model.build`, and all names allowed in the file.

    ``model_state`` is by the names of `Model.build`, and ``tensors`` by those in the file.
    """
    # Files of a user's network by earlier versions have the units' indices in the names, as the model has.
    has_indices = _without_counters(tensors) == _without_counters(model_state)
    builder = model.builder
    if builder is None or has_indices:
        same_names = {name: name for name in model_state}
        return same_names, set(model_state)
    network_state = _state_shapes(lambda: builder.network(seed=0))
    file_names = {name: plain_name(name) for name in model_state}
    # The network may have tensors that no unit uses.
    allowed_names = {*file_names.values(), *network_state}
    return file_names, allowed_names


def _missing_tensor(name: str, model_tensor: torch.Tensor) -> torch.Tensor:
    """Return the initial values of a tensor that a file may lack, with the shape and type of ``model_tensor``."""
    from testbed.ml.models.lora import initial_values, is_adapter

    if is_adapter(name):
        return initial_values(name, model_tensor)
    # A counter of a normalisation.
    return torch.zeros(model_tensor.shape, dtype=model_tensor.dtype)


def _type_and_shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {list(tensor.shape)}"


def _state_shapes(build: Callable[[], nn.Module]) -> State:
    """Return the state of a module, without values where possible: drawing the weights would take long."""
    try:
        with torch.device("meta"):
            module = build()
    except (RuntimeError, NotImplementedError):
        # The network reads values while it is constructed.
        module = build()
    return module.state_dict()


def _without_prefixes(tensors: State, allowed_names: Collection[str]) -> State:
    """Return the tensors of a file by their names without the prefixes of wrappers."""
    # Wrappers may be nested, each with a prefix of its own.
    while allowed_names and tensors:
        prefix = _common_prefix(tensors)
        # All names of the network may begin with a prefix, if a module has this name.
        if prefix is None or _all_begin(allowed_names, prefix):
            break
        without_prefix = {}
        for name, tensor in tensors.items():
            without_prefix[name.removeprefix(prefix)] = tensor
        tensors = without_prefix
    tensors_by_name = {}
    for name, tensor in tensors.items():
        if name not in allowed_names:
            # torch.compile of single layers puts its prefix into the middle of names.
            name = name.replace("_orig_mod.", "")
        tensors_by_name[name] = tensor
    return tensors_by_name


def _common_prefix(names: Collection[str]) -> str | None:
    """Return the prefix of a wrapper with which all names begin; None without one."""
    for prefix in _WRAPPER_PREFIXES:
        if _all_begin(names, prefix):
            return prefix
    return None


def _all_begin(names: Collection[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _without_counters(names: Collection[str]) -> set[str]:
    return {name for name in names if not name.endswith(_COUNTER)}


def _list_names(names: Collection[str]) -> str:
    first_names = ", ".join(sorted(names)[:_MAX_NAMES])
    other_names = len(names) - _MAX_NAMES
    return f"{first_names} (and {other_names} more)" if other_names > 0 else first_names


def facts(path: Path, model: Model) -> dict[str, Any]:
    """Return the format, name, size and digest of a weights file, to identify the file in results."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    identity = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
    if is_scenario(path):
        return {"format": "scenario", **identity}
    file_format = _detect_format(path)
    if file_format != "darknet":
        return {"format": file_format, **identity}
    header = darknet.check(path, model)
    version = ".".join(map(str, header.version))
    return {
        "format": f"darknet {version}",
        **identity,
        "images_seen": header.images_seen,
    }


def _detect_format(path: Path) -> Literal["safetensors", "torch", "darknet"]:
    """Return the format of a file by its first bytes; a file of neither of the other formats counts as Darknet's."""
    try:
        with path.open("rb") as file:
            first_bytes = file.read(_BRACE_OFFSET + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if first_bytes[_BRACE_OFFSET:] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    if first_bytes.startswith((_ARCHIVE, _OLD_PICKLE)):
        return "torch"
    return "darknet"
