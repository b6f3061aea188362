"""Public architectures: trace and cut each, and compare the parts with the undivided network.

`make corpus` checks all of them and needs the extras `vision` and `transformers`; tests check the small ones.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.common.usercode import Code
from testbed.ml.models import Model
from testbed.ml.models.maker import MODEL_FILE_KEY
from testbed.ml.models.own import create_own
from tests.corpus import networks

PICTURE = (1, 8, 8)
SAMPLES = 4
CLASSES = 10


@dataclass(frozen=True)
class Architecture:
    """A network with its inputs."""

    name: str
    text: str
    """Source code with ``function``, which returns the network."""
    function: str = "build"
    shape: tuple[int, ...] = PICTURE
    tokens: int = 0
    """Size of the vocabulary if samples are tokens, else 0."""
    layers: int = 1
    """Number of stacked layers; the network must be cut into at least as many units."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> Code:
        """The source code as a user's file in a scenario."""
        module = f"corpus_{self.name.replace('-', '_')}"
        return Code(name=self.function, module=module, sources={module: self.text})

    def model(self) -> Model:
        """Return the traced network, cut into units."""
        return create_own(
            self.code, self.options, self.shape, CLASSES, integers=self.tokens > 0
        )

    def samples(self) -> torch.Tensor:
        """Return random samples of shape (samples, ...)."""
        draws = torch.Generator().manual_seed(1)
        shape = (SAMPLES, *self.shape)
        if self.tokens:
            return torch.randint(1, self.tokens, shape, generator=draws)
        return torch.rand(shape, generator=draws)

    def undivided(self, seed: int) -> nn.Module:
        """Return the network from the user's code, with the weights that the testbed draws."""
        torch.manual_seed(derive(seed, "weights"))
        network: nn.Module = usercode.function(self.code, MODEL_FILE_KEY)(
            **self.options
        )
        # Units compute activations out of place, too, since another unit may read their inputs.
        for module in network.modules():
            if getattr(module, "inplace", False) is True:
                module.inplace = False
        return network


def sum_tied_gradients(model: Model, parts: Sequence[nn.Module]) -> None:
    """Replace the gradients of all copies of a tied weight by their sum, as the stages of a pipeline do."""
    parameters = [dict(part.named_parameters()) for part in parts]
    for tied in model.tied_weights:
        copies = []
        for named in parameters:
            copies += [named[name] for name in tied.names if name in named]
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        total = torch.stack(gradients).sum(0)
        for copy in copies:
            copy.grad = total.clone()


def _logits(output: Any) -> torch.Tensor:
    """Return the logits of a network that returns a tensor, or a mapping as transformers do."""
    logits: torch.Tensor = output["logits"] if isinstance(output, Mapping) else output
    return logits


def assert_parts_equal_whole(
    architecture: Architecture, model: Model, cuts: Sequence[int]
) -> None:
    """Compare a model in parts with the undivided network: outputs, gradients, an update and all state.

    Raises AssertionError for differences beyond rounding.
    """
    whole, inputs = architecture.undivided(seed=5), architecture.samples()
    labels = torch.arange(SAMPLES) % CLASSES
    # Both draw the same random numbers for dropout.
    torch.manual_seed(0)
    expected = _logits(whole(inputs))
    nn.functional.cross_entropy(expected, labels).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    parts = [
        model.build(first, last, seed=5).train()
        for first, last in itertools.pairwise(cuts)
    ]
    torch.manual_seed(0)
    _train_step(model, parts, inputs, labels, expected)
    _assert_equal_state(parts, whole)
    evaluated = _logits(whole.eval()(inputs))
    outputs = inputs
    for part in parts:
        outputs = part.eval()(outputs.detach())
    assert torch.allclose(outputs, evaluated, atol=1e-4), "in evaluation"


def _train_step(
    model: Model,
    parts: Sequence[nn.Module],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """Train the parts on one batch, each on its device: gradients are passed from part to part."""
    part_inputs, part_outputs = [], []
    activation = inputs
    for part in parts:
        # Another device receives a tensor without history.
        activation = activation.detach()
        if activation.is_floating_point():
            activation.requires_grad_()
        part_inputs.append(activation)
        activation = part(activation)
        part_outputs.append(activation)
    difference = (activation - expected).abs().max()
    assert torch.allclose(activation, expected, atol=1e-5), difference
    nn.functional.cross_entropy(activation, labels).backward()
    for index in range(len(parts) - 2, -1, -1):
        part_outputs[index].backward(part_inputs[index + 1].grad)
    sum_tied_gradients(model, parts)
    for part in parts:
        parameters = list(part.parameters())
        # SGD refuses an empty list.
        if parameters:
            torch.optim.SGD(parameters, lr=0.1).step()


def _assert_equal_state(parts: Sequence[nn.Module], whole: nn.Module) -> None:
    """Check that the parts have all trained weights of the undivided network, with equal values."""
    state: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, value in part.state_dict().items():
            # The first component of a name is the number of the unit.
            state[name.partition(".")[2]] = value
    expected = whole.state_dict()
    assert state.keys() <= expected.keys(), state.keys() - expected.keys()
    # A tied weight has several names, one of which suffices.
    present = set()
    for name, weight in whole.named_parameters(remove_duplicate=False):
        if name in state:
            present.add(id(weight))
    missing = [
        name
        for name, weight in whole.named_parameters()
        if weight.grad is not None and id(weight) not in present
    ]
    assert not missing, f"no unit has {missing}"
    for name, value in state.items():
        assert torch.allclose(value, expected[name], atol=1e-5, equal_nan=True), name


def cut_positions(units: int) -> list[list[int]]:
    """Return three lists of cuts: one part, two parts, and one part for each unit."""
    if units == 1:
        return [[0, 1]]
    return [[0, units], [0, units // 2, units], list(range(units + 1))]


# Networks of `tests.corpus.networks` whose samples are tokens.
_TOKENS = {
    "TextCnn",
    "Bag",
    "Recurrent",
    "Gru",
    "BiLstm",
    "Elman",
    "Padded",
    "Causal",
    "Translator",
    "Wide",
}
# Numbers of stacked layers, where a network has more than one.
_DEPTHS = {
    "Padded": 12,
    "Causal": 3,
    "Recurrent": 3,
    "Gru": 3,
    "BiLstm": 3,
    "Elman": 3,
    "Decoder": 3,
    "Crnn": 3,
}


def torch_architectures() -> list[Architecture]:
    """Return all architectures of `tests.corpus.networks`."""
    text = inspect.getsource(networks)
    architectures = []
    for name, member in vars(networks).items():
        if not inspect.isclass(member) or not issubclass(member, nn.Module):
            continue
        has_tokens = name in _TOKENS
        architectures.append(
            Architecture(
                name,
                text,
                function=name,
                shape=(7,) if has_tokens else PICTURE,
                tokens=networks.TOKENS if has_tokens else 0,
                layers=_DEPTHS.get(name, 1),
            )
        )
    return architectures


_VISION = (
    "alexnet", "convnext_tiny", "densenet121", "densenet169", "efficientnet_b0", "efficientnet_b1", "efficientnet_v2_s",
    "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet34", "resnet50", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11",
    "vgg11_bn", "vit_b_16", "wide_resnet50_2",
)  # fmt: skip
# Side of an image in pixels, where 64 is too small for a network or larger than necessary.
_SIZES = {"inception_v3": 96, "maxvit_t": 224, "vit_b_16": 32}
# Auxiliary classifiers would make the output a tuple.
_ARGUMENTS = {
    "googlenet": ", aux_logits=False, init_weights=False",
    "inception_v3": ", aux_logits=False, init_weights=False",
    "vit_b_16": ", image_size=32",
    "maxvit_t": "",
}
_LAYERS = {
    "vit_b_16": 12,
    "swin_t": 12,
    "swin_v2_t": 12,
    "resnet50": 16,
    "densenet121": 12,
}
# Compiled operations of torchvision, which its Python code registers gradients for.
_OPERATIONS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align",
    "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


def has_torchvision() -> bool:
    """Return whether torchvision can be imported.

    If it was built for another build of torch, its compiled operations are missing. Classifiers do not use these, so
    this function declares them and imports torchvision again.
    """
    try:
        import torchvision
    except ImportError:
        return False
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATIONS:
            library.define(f"{name}(Tensor values) -> Tensor")
        _LIBRARIES.append(library)
        # The failed import left modules behind.
        for name in list(sys.modules):
            if name.partition(".")[0] == "torchvision":
                del sys.modules[name]
        import torchvision  # noqa: F401
    return True


_LIBRARIES: list[Any] = []
"""Declared libraries; torch removes their operations when they are collected."""


def torchvision_architectures() -> list[Architecture]:
    """Return architectures of torchvision."""
    architectures = []
    for name in _VISION:
        arguments = f"num_classes={CLASSES}{_ARGUMENTS.get(name, '')}"
        text = f"from torchvision.models import {name}\n\n\ndef build():\n"
        text += f"    return {name}({arguments})\n"
        size = _SIZES.get(name, 64)
        shape, layers = (3, size, size), _LAYERS.get(name, 1)
        architectures.append(Architecture(name, text, shape=shape, layers=layers))
    return architectures


_VOCABULARY = 50
_BERT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_LLAMA = {
    **_BERT,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
    "use_cache": False,
}
_VIT = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
# Prefix of the classes, key of the number of layers (empty if fixed) and configuration, by name.
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "num_hidden_layers", _BERT),
    "distilbert": (
        "DistilBert",
        "n_layers",
        {"vocab_size": 50, "dim": 16, "n_heads": 2, "hidden_dim": 32},
    ),
    "roberta": (
        "Roberta",
        "num_hidden_layers",
        {**_BERT, "pad_token_id": 0, "max_position_embeddings": 32},
    ),
    "electra": ("Electra", "num_hidden_layers", {**_BERT, "embedding_size": 16}),
    "mpnet": ("MPNet", "num_hidden_layers", {**_BERT, "pad_token_id": 0}),
    "albert": ("Albert", "num_hidden_layers", {**_BERT, "embedding_size": 8}),
    "gpt2": (
        "GPT2",
        "n_layer",
        {
            "vocab_size": 50,
            "n_embd": 16,
            "n_head": 2,
            "pad_token_id": 0,
            "use_cache": False,
        },
    ),
    "gpt-neo": (
        "GPTNeo",
        "num_layers",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_heads": 2,
            "pad_token_id": 0,
            "use_cache": False,
            "attention_types": [[["global"], 12]],
            "max_position_embeddings": 32,
        },
    ),
    "gpt-neox": (
        "GPTNeoX",
        "num_hidden_layers",
        {**_BERT, "pad_token_id": 0, "use_cache": False},
    ),
    "opt": (
        "OPT",
        "num_hidden_layers",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "ffn_dim": 32,
            "num_attention_heads": 2,
            "word_embed_proj_dim": 16,
            "pad_token_id": 0,
            "use_cache": False,
            "max_position_embeddings": 32,
        },
    ),
    "bloom": (
        "Bloom",
        "n_layer",
        {
            "vocab_size": 50,
            "hidden_size": 16,
            "n_head": 2,
            "pad_token_id": 0,
            "use_cache": False,
        },
    ),
    "llama": ("Llama", "num_hidden_layers", _LLAMA),
    "mistral": ("Mistral", "num_hidden_layers", _LLAMA),
    "qwen2": ("Qwen2", "num_hidden_layers", _LLAMA),
    "gemma": ("Gemma", "num_hidden_layers", _LLAMA),
    "phi": (
        "Phi",
        "num_hidden_layers",
        {**_BERT, "pad_token_id": 0, "use_cache": False},
    ),
    "t5-encoder": ("T5", "num_layers", {}),
    "vit": ("ViT", "num_hidden_layers", _VIT),
    "deit": ("DeiT", "num_hidden_layers", _VIT),
    "beit": ("Beit", "num_hidden_layers", _VIT),
    "convnext": (
        "ConvNext",
        "",
        {"hidden_sizes": [4, 8, 8, 8], "depths": [2, 2, 2, 2], "num_channels": 3},
    ),
    "segformer": (
        "Segformer",
        "",
        {"hidden_sizes": [8, 8, 8, 8], "num_attention_heads": [1, 1, 2, 2]},
    ),
    "poolformer": ("PoolFormer", "", {"hidden_sizes": [4, 8, 8, 8]}),
}
_IMAGE_MODELS = ("vit", "deit", "beit", "convnext", "segformer", "poolformer")
_T5 = """from torch import nn
from transformers import T5Config, T5EncoderModel


class Build(nn.Module):
    def __init__(self):
        super().__init__()
        self.t5 = T5EncoderModel(T5Config(vocab_size=50, d_model=16, num_layers={layers}, num_heads=2, d_ff=32, d_kv=8))
        self.head = nn.Linear(16, 10)

    def forward(self, tokens):
        return self.head(self.t5(tokens).last_hidden_state.mean(1))
"""


def transformers_architectures(layers: int = 12) -> list[Architecture]:
    """Return tiny classifiers of transformers, with this number of layers where it is configurable."""
    architectures = []
    for name, (family, depth_key, options) in _MODELS.items():
        has_images = name in _IMAGE_MODELS
        function = "build"
        if name == "t5-encoder":
            # transformers has no sequence classifier with the encoder alone.
            function, text = "Build", _T5.format(layers=layers)
        else:
            config = {**options, "num_labels": CLASSES}
            if depth_key:
                config[depth_key] = layers
            if name == "gpt-neo":
                config["attention_types"] = [[["global"], layers]]
            kind = "Image" if has_images else "Sequence"
            text = "import transformers\n\n\ndef build():\n"
            text += f"    config = transformers.{family}Config(**{config!r})\n"
            text += f"    return transformers.{family}For{kind}Classification(config)\n"
        shape: tuple[int, ...] = (8,)
        if has_images:
            # Models without a configurable depth reduce images several times.
            shape = (3, 16, 16) if depth_key else (3, 32, 32)
        architectures.append(
            Architecture(
                name,
                text,
                function,
                shape,
                tokens=0 if has_images else _VOCABULARY,
                layers=layers if depth_key else 1,
            )
        )
    return architectures


def main(names: Sequence[str]) -> int:
    """Check all architectures, or those with these names; print results and return the number of failures."""
    import warnings

    warnings.filterwarnings("ignore")
    architectures = torch_architectures()
    if has_torchvision():
        architectures += torchvision_architectures()
    architectures += transformers_architectures()
    if names:
        architectures = [item for item in architectures if item.name in names]
    cut, whole, failed = [], [], []
    for architecture in architectures:
        name = architecture.name
        start = time.perf_counter()
        try:
            model = architecture.model()
            duration = time.perf_counter() - start
            units = len(model.units)
            for cuts in cut_positions(units):
                assert_parts_equal_whole(architecture, model, cuts)
            is_cut = units > 1 and units >= architecture.layers
            (cut if is_cut else whole).append(name)
            print(f"{name:20} {units:3} units, traced in {duration:.1f} s", flush=True)
        except (InputError, AssertionError) as error:
            failed.append(name)
            print(f"{name:20} {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"{len(cut)} of {len(architectures)} are cut into units and equal the whole")
    print(f"not cut: {', '.join(whole) or 'none'}")
    print(f"refused or unequal: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
