"""Weights of a model: drawn from a seed, or read from a safetensors or GGUF file in the Llama layout.

All sources have the names of Hugging Face's Llama checkpoints, such as ``model.layers.3.mlp.up_proj.weight``. The part
that all layers have in common, here ``mlp.up_proj``, is the short name of a weight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.plan import Assignment
from testbed_generation.architecture import Architecture
from testbed_generation.messages import Assign
from testbed_generation.sharding import Shard

EMBEDDING = "model.embed_tokens.weight"
"""Name of the token embedding."""
NORM = "model.norm.weight"
"""Name of the scales of the normalisation before the output matrix."""
OUTPUT = "lm_head.weight"
"""Name of the output matrix; a model whose output matrix is the embedding has no such weight."""
_KEY = ("workload", "model", "weights")
"""Key of the scenario that names the file, for errors."""
DRAFT = "draft."
"""Prefix of the names of a draft model's weights, which are sent together with those of the model."""


def layer_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a layer by its short name."""
    width, hidden = architecture.width, architecture.hidden
    query_values, kv_values = architecture.query_values, architecture.kv_values
    return {
        "input_layernorm": (width,),
        "self_attn.q_proj": (query_values, width),
        "self_attn.k_proj": (kv_values, width),
        "self_attn.v_proj": (kv_values, width),
        "self_attn.o_proj": (width, query_values),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of the model by its name in a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (architecture.vocabulary, architecture.width)
    }
    for layer in range(architecture.layers):
        for name, shape in layer_shapes(architecture).items():
            shapes[weight_name(layer, name)] = shape
    shapes[NORM] = (architecture.width,)
    if not architecture.tied:
        shapes[OUTPUT] = (architecture.vocabulary, architecture.width)
    return shapes


def weight_name(layer: int, name: str) -> str:
    """Return a weight's name in a checkpoint.

    >>> weight_name(3, "mlp.up_proj")
    'model.layers.3.mlp.up_proj.weight'
    """
    return f"model.layers.{layer}.{name}.weight"


class WeightSource(Protocol):
    """A source of weights: the seed, a file, or weights received by a device."""

    def read(self, name: str) -> Tensor:
        """Return a weight in float32 by its name in a checkpoint."""


class SeededWeights:
    """Weights drawn from a seed, each by a generator of its own, so that a device draws only the weights that it holds.

    The values of a matrix are normally distributed with variance 1 / inputs. The matrices whose products are added to
    the residual stream are smaller by sqrt(2 * layers), as in GPT-2. Vectors, the scales of normalisations, are one.
    """

    def __init__(self, architecture: Architecture, seed: int) -> None:
        self._architecture = architecture
        self._seed = seed
        self._shapes = weight_shapes(architecture)

    def read(self, name: str) -> Tensor:
        """Return a weight, which is the same on every device and for every division of the model."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        seed = derive(self._seed, "generation", name)
        generator = torch.Generator().manual_seed(seed)
        # Products then have the variance of their inputs, and sums over all layers do not grow with their number.
        deviation = 1 / math.sqrt(shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            deviation /= math.sqrt(2 * self._architecture.layers)
        return torch.randn(shape, generator=generator) * deviation


def _broken_file_error(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path}: no weights can be read ({error}): copy or download the file again",
        _KEY,
    )


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each weight, by name; raises `InputError` for a broken index."""
    try:
        files: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _broken_file_error(path, error) from None
    return files


class Checkpoint:
    """Weights of a safetensors file, or of a folder of files with an index, in Hugging Face's Llama layout."""

    def __init__(self, path: Path) -> None:
        """Open a file or folder. Raises `InputError` if the file is missing."""
        self._path = path
        self._index: Mapping[str, str] = {}
        """File of each weight; empty for a checkpoint of one file."""
        index = path / "model.safetensors.index.json"
        if index.is_file():
            self._index = _read_index(index)
        elif path.is_dir():
            self._path = path / "model.safetensors"
        if not self._index and not self._path.is_file():
            raise InputError(
                f"{self._path}: no such file: name a .safetensors or .gguf file, or a folder with model.safetensors",
                _KEY,
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        with self._open_file(name) as checkpoint:
            return tuple(checkpoint.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a weight in float32."""
        with self._open_file(name) as checkpoint:
            weight: Tensor = checkpoint.get_tensor(name)
            return weight.float()

    @contextmanager
    def _open_file(self, name: str) -> Iterator[Any]:
        """Open the file with a weight; raises `InputError` if the weight is missing or the file is broken."""
        file = self._path
        if name in self._index:
            file = self._path / self._index[name]
        elif self._index:
            raise _missing_weight_error(file, name)
        try:
            opened = safe_open(file, framework="pt")
        # An index may name a file that is missing.
        except (SafetensorError, OSError) as error:
            raise _broken_file_error(file, error) from None
        with opened as checkpoint:
            if name not in checkpoint.keys():  # noqa: SIM118 - a safetensors file is not a mapping
                raise _missing_weight_error(file, name)
            yield checkpoint


def _missing_weight_error(file: Path, name: str) -> InputError:
    text = f"{file}: has no weight {name}: name a file in the Llama layout"
    return InputError(text, _KEY)


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The name in a GGUF file of each weight of a layer, by short name."""


class GgufFile:
    """Weights of a GGUF file of a Llama model, converted to float32."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises `InputError` if the file cannot be read or the package gguf is not installed."""
        try:
            import gguf
        except ImportError:
            raise InputError(
                f"{path}: install the package that reads GGUF files: pip install gguf",
                _KEY,
            ) from None
        if not path.is_file():
            raise InputError(f"{path}: no such file: name a .gguf file", _KEY)
        self._dequantise = gguf.quants.dequantize
        try:
            self._reader = gguf.GGUFReader(path)
        except ValueError as error:
            raise _broken_file_error(path, error) from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def read_number(self, key: str) -> float | None:
        """Return a number of the file's metadata, such as ``llama.block_count``; None for a missing key."""
        field = self._reader.get_field(key)
        return None if field is None else float(field.contents())

    def read_strings(self, key: str) -> list[str]:
        """Return a list of strings of the file's metadata, such as ``tokenizer.ggml.tokens``."""
        field = self._reader.get_field(key)
        return [] if field is None else list(field.contents())

    def read_text(self, key: str) -> str:
        """Return a text of the file's metadata; empty for a missing key."""
        field = self._reader.get_field(key)
        return "" if field is None else str(field.contents())

    @cached_property
    def architecture(self) -> Architecture:
        """The model's shape according to the metadata."""
        heads = self._llama_number("attention.head_count")
        # Files of the first Llama models lack the keys with a default here.
        kv_heads = self._llama_number("attention.head_count_kv", default=heads)
        rope_base = self._llama_number("rope.freq_base", default=10_000.0)
        epsilon = self._llama_number("attention.layer_norm_rms_epsilon", default=1e-5)
        return Architecture(
            layers=int(self._llama_number("block_count")),
            width=int(self._llama_number("embedding_length")),
            heads=int(heads),
            kv_heads=int(kv_heads),
            hidden=int(self._llama_number("feed_forward_length")),
            vocabulary=len(self.read_strings("tokenizer.ggml.tokens")),
            context=int(self._llama_number("context_length")),
            rope_base=rope_base,
            epsilon=epsilon,
            # llama.cpp omits the output matrix from a file if the matrix is the embedding.
            tied="output.weight" not in self._tensors,
        )

    def _llama_number(self, key: str, default: float | None = None) -> float:
        """Return a number of the metadata whose key begins with ``llama.``; a missing key has the default.

        Raises `InputError` if a key without a default is missing.
        """
        number = self.read_number(f"llama.{key}")
        if number is not None:
            return number
        if default is not None:
            return default
        raise InputError(
            f"the GGUF file has no llama.{key}: name a file of a model of the Llama family",
            _KEY,
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight; a GGUF file lists the axes in reverse order."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def _tensor(self, name: str) -> Any:
        gguf_name = _gguf_name(name)
        if gguf_name not in self._tensors:
            raise InputError(
                f"the GGUF file has no weight {gguf_name}: name a file of a model of the Llama family",
                _KEY,
            )
        return self._tensors[gguf_name]

    def read(self, name: str) -> Tensor:
        """Return a weight in float32 by its name in Hugging Face's layout."""
        tensor = self._tensor(name)
        values = self._dequantise(tensor.data, tensor.tensor_type)
        weight = torch.tensor(values, dtype=torch.float32)
        if name.endswith("q_proj.weight"):
            return _unpermute(weight, self.architecture.heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(weight, self.architecture.kv_heads)
        return weight


def _gguf_name(name: str) -> str:
    """Return the name in a GGUF file of the weight that Hugging Face's layout calls ``name``."""
    outer_names = {
        EMBEDDING: "token_embd.weight",
        NORM: "output_norm.weight",
        OUTPUT: "output.weight",
    }
    if name in outer_names:
        return outer_names[name]
    # A name of a layer's weight is model.layers.LAYER.SHORT_NAME.weight.
    _, _, layer, short_name = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[short_name]}.weight"


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Return a query or key matrix of a GGUF file with its rows in the order of Hugging Face's layout.

    Rotary positions rotate pairs of rows of a head. A pair is two neighbouring rows in a GGUF file, and rows i and
    i + half in Hugging Face's layout.
    """
    half = weight.shape[0] // heads // 2
    pairs = weight.view(heads, half, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def open_weights(path: Path) -> Checkpoint | GgufFile:
    """Return the weights of a file or folder; raises `InputError`."""
    if path.suffix != ".gguf":
        return Checkpoint(path)
    modified = path.stat().st_mtime if path.is_file() else 0.0
    return _open_gguf(path, modified)


@lru_cache(maxsize=1)
def _open_gguf(path: Path, modified: float) -> GgufFile:
    # The shape, the tokens and the weights are read in separate calls from one opened file. The time of modification is
    # an argument, and so a part of the cache's key, in order that a changed file is opened again.
    return GgufFile(path)


def check_shapes(file: Checkpoint | GgufFile, architecture: Architecture) -> None:
    """Raise `InputError` for a weight that is missing, or has another shape than in the model."""
    for name, model_shape in weight_shapes(architecture).items():
        file_shape = file.shape(name)
        if file_shape != model_shape:
            file_sizes = " x ".join(map(str, file_shape))
            model_sizes = " x ".join(map(str, model_shape))
            raise InputError(
                f"{name} has the shape {file_sizes}, the model needs {model_sizes}: choose the preset of these weights",
                _KEY,
            )


def read_layer(
    weight_source: WeightSource,
    architecture: Architecture,
    layer: int,
    shard: Shard | None = None,
) -> dict[str, Tensor]:
    """Return the weights of a layer, or of a shard of the layer, by short name."""
    weights = {}
    for name in layer_shapes(architecture):
        weight = weight_source.read(weight_name(layer, name))
        if shard is not None:
            weight = weight[shard.weight_indices(name, architecture)]
        weights[name] = weight.contiguous()
    return weights


class ReceivedWeights:
    """A source of the weights received by a device from the coordinator."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """``weights`` are tensors by their names in a checkpoint."""
        self._weights = weights

    def read(self, name: str) -> Tensor:
        """Return a weight in float32."""
        return self._weights[name].float()


def read_weights(
    weight_source: WeightSource, architecture: Architecture
) -> dict[str, Tensor]:
    """Return all weights of a model in float32 by their names in a checkpoint."""
    weights = {}
    for name in weight_shapes(architecture):
        weights[name] = weight_source.read(name).contiguous()
    return weights


def layer_weight_names(architecture: Architecture, start: int, stop: int) -> list[str]:
    """Return the names of the weights of layers ``start`` to ``stop`` (exclusive).

    If the last layer of the model is among them, the weights of the output are included as well.
    """
    names = []
    for layer in range(start, stop):
        for short_name in layer_shapes(architecture):
            names.append(weight_name(layer, short_name))
    if stop == architecture.layers:
        # The stage with the last layer also chooses tokens.
        names += [NORM, EMBEDDING if architecture.tied else OUTPUT]
    return names


def assignment_weight_names(
    architecture: Architecture, assignments: Sequence[Assignment]
) -> list[str]:
    """Return the names of the weights needed by the assignments of a device, each name once."""
    # The dictionary is an ordered set: two assignments may need the same weight.
    unique_names: dict[str, None] = {}
    for assignment in assignments:
        names = layer_weight_names(architecture, assignment.start, assignment.stop)
        unique_names |= dict.fromkeys(names)
    return list(unique_names)


def assigned_weights(
    weights: Mapping[str, Tensor], architecture: Architecture, assign: Assign
) -> dict[str, Tensor]:
    """Return the weights needed by the layers of the message ``assign``."""
    # The field `last` of the message is the layer after the last one.
    names = layer_weight_names(architecture, start=assign.first, stop=assign.last)
    return {name: weights[name] for name in names}
