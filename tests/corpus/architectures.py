"""Public architectures, rebuilt: each traced, cut into units, and held against the network as its user would make it.

`make corpus` does so with all, and needs the extras `vision` and `transformers`; tests take the small ones.
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
from testbed.ml.models.making import KEY
from testbed.ml.models.own import create_own
from tests.corpus import networks

PICTURE = (1, 8, 8)
SAMPLES = 4
CLASSES = 10


@dataclass(frozen=True)
class Architecture:
    """A network and what enters it."""

    name: str
    text: str
    function: str = "build"
    shape: tuple[int, ...] = PICTURE
    tokens: int = 0
    """Above 0: samples are tokens below that number."""
    layers: int = 1
    """Of the stack that it has: it must be cut into as many units, at least."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def code(self) -> Code:
        """The text as the file of a scenario."""
        module = f"corpus_{self.name.replace('-', '_')}"
        return Code(name=self.function, module=module, sources={module: self.text})

    def model(self) -> Model:
        """Trace and cut it."""
        return create_own(
            self.code, self.options, self.shape, CLASSES, integers=self.tokens > 0
        )

    def samples(self) -> torch.Tensor:
        """Return random samples, (samples, ...)."""
        draws = torch.Generator().manual_seed(1)
        if self.tokens:
            return torch.randint(
                1, self.tokens, (SAMPLES, *self.shape), generator=draws
            )
        return torch.rand(SAMPLES, *self.shape, generator=draws)

    def undivided(self, seed: int) -> nn.Module:
        """Return the network as its user would make it."""
        torch.manual_seed(derive(seed, "weights"))
        module: nn.Module = usercode.function(self.code, KEY)(**self.options)
        for each in module.modules():  # a unit leaves alone what others may read
            if getattr(each, "inplace", False) is True:
                each.inplace = False
        return module


def sum_tied_gradients(model: Model, parts: Sequence[nn.Module]) -> None:
    """Give all copies of a tied weight the sum of their gradients, as the stages of a pipeline do."""
    for tied in model.tied:
        named = [dict(part.named_parameters()) for part in parts]
        copies = [
            weights[name] for weights in named for name in tied.names if name in weights
        ]
        total = torch.stack(
            [copy.grad for copy in copies if copy.grad is not None]
        ).sum(0)
        for copy in copies:
            copy.grad = total.clone()


def assert_parts_equal_whole(
    each: Architecture, model: Model, cuts: Sequence[int]
) -> None:
    """Hold a model in parts against the undivided network: forward, gradients, an update and all state.

    Raises AssertionError where they differ by more than rounding.
    """
    whole, inputs = each.undivided(seed=5), each.samples()
    labels = torch.arange(SAMPLES) % CLASSES
    torch.manual_seed(0)
    expected = whole(inputs)
    expected = expected["logits"] if isinstance(expected, Mapping) else expected
    nn.functional.cross_entropy(expected, labels).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    parts = [
        model.build(first, last, seed=5).train()
        for first, last in itertools.pairwise(cuts)
    ]
    crossing, entered, left = inputs, [], []
    torch.manual_seed(0)
    for part in parts:  # as devices do: what crosses is another tensor there
        crossing = crossing.detach()
        entered.append(
            crossing.requires_grad_() if crossing.is_floating_point() else crossing
        )
        crossing = part(entered[-1])
        left.append(crossing)
    assert torch.allclose(left[-1], expected, atol=1e-5), (
        (left[-1] - expected).abs().max()
    )
    nn.functional.cross_entropy(left[-1], labels).backward()
    for at in range(len(parts) - 2, -1, -1):
        left[at].backward(entered[at + 1].grad)
    sum_tied_gradients(model, parts)
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        if own := list(part.parameters()):
            torch.optim.SGD(own, lr=0.1).step()
        found |= {
            name.partition(".")[2]: value for name, value in part.state_dict().items()
        }
    state, weights = whole.state_dict(), dict(whole.named_parameters())
    assert found.keys() <= state.keys(), found.keys() - state.keys()
    read = {
        id(each)
        for name, each in whole.named_parameters(remove_duplicate=False)
        if name in found
    }
    unread = [
        name
        for name, each in weights.items()
        if each.grad is not None and id(each) not in read
    ]
    assert not unread, f"no unit has {unread}"
    for name, value in found.items():
        assert torch.allclose(value, state[name], atol=1e-5, equal_nan=True), name
    evaluated = whole.eval()(inputs)
    evaluated = evaluated["logits"] if isinstance(evaluated, Mapping) else evaluated
    crossing = inputs
    for part in parts:
        crossing = part.eval()(crossing.detach())
    assert torch.allclose(crossing, evaluated, atol=1e-4), "in evaluation"


def cut_positions(units: int) -> list[list[int]]:
    """Return where to cut: nowhere, in the middle, everywhere."""
    return [
        [0, units],
        *([[0, units // 2, units], [*range(units + 1)]] if units > 1 else []),
    ]


# The corpus

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
    """Return those of plain torch."""
    text = inspect.getsource(networks)
    names = [
        name
        for name, each in vars(networks).items()
        if inspect.isclass(each) and issubclass(each, nn.Module)
    ]
    return [
        Architecture(
            name,
            text,
            name,
            (7,) if name in _TOKENS else PICTURE,
            networks.TOKENS if name in _TOKENS else 0,
            _DEPTHS.get(name, 1),
        )
        for name in names
    ]


_VISION = (
    "alexnet", "convnext_tiny", "densenet121", "densenet169", "efficientnet_b0", "efficientnet_b1", "efficientnet_v2_s",
    "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet34", "resnet50", "resnext50_32x4d",
    "shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "squeezenet1_0", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11",
    "vgg11_bn", "vit_b_16", "wide_resnet50_2",
)  # fmt: skip
_SIZES = {"inception_v3": 96, "maxvit_t": 224, "vit_b_16": 32}
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
_OPERATIONS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align",
    "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


def has_torchvision() -> bool:
    """Say whether torchvision can be imported, and let it be where it was built for another build of torch.

    Its compiled operations are then missing, which networks that classify do not use.
    """
    try:
        import torchvision
    except ImportError:
        return False
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATIONS:
            library.define(f"{name}(Tensor values) -> Tensor")
        _KEPT.append(library)
        for name in [
            name for name in sys.modules if name.partition(".")[0] == "torchvision"
        ]:
            del sys.modules[name]
        import torchvision  # noqa: F401
    return True


_KEPT: list[Any] = []


def torchvision_architectures() -> list[Architecture]:
    """Return those of torchvision."""
    return [
        Architecture(
            name,
            f"from torchvision.models import {name}\n\n\ndef build():\n"
            f"    return {name}(num_classes={CLASSES}{_ARGUMENTS.get(name, '')})\n",
            shape=(3, _SIZES.get(name, 64), _SIZES.get(name, 64)),
            layers=_LAYERS.get(name, 1),
        )
        for name in _VISION
    ]


_BERT = {
    "vocab_size": 50,
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
    """Return those of transformers' configurations, tiny, with so many layers each."""
    found = []
    for name, (family, depth, options) in _MODELS.items():
        pictures = name in (
            "vit",
            "deit",
            "beit",
            "convnext",
            "segformer",
            "poolformer",
        )
        given = {**options, **({depth: layers} if depth else {}), "num_labels": CLASSES}
        if name == "gpt-neo":
            given["attention_types"] = [[["global"], layers]]
        kind = f"{family}For{'Image' if pictures else 'Sequence'}Classification"
        text = f"import transformers\n\n\ndef build():\n    config = transformers.{family}Config(**{given!r})\n"
        text += f"    return transformers.{kind}(config)\n"
        text = _T5.format(layers=layers) if name == "t5-encoder" else text
        shape = (3, 32, 32) if not depth else (3, 16, 16) if pictures else (8,)
        function = "Build" if name == "t5-encoder" else "build"
        found.append(
            Architecture(
                name,
                text,
                function,
                shape,
                0 if pictures else 50,
                layers if depth else 1,
            )
        )
    return found


def main(names: Sequence[str]) -> int:
    """Check all, or those of these names; print a line each and the counts, return the number that fail."""
    import warnings

    warnings.filterwarnings("ignore")
    everything = [
        *torch_architectures(),
        *(torchvision_architectures() if has_torchvision() else []),
        *transformers_architectures(),
    ]
    wanted = [each for each in everything if not names or each.name in names]
    cut, whole, failed = [], [], []
    for each in wanted:
        began = time.perf_counter()
        try:
            model = each.model()
            took = time.perf_counter() - began
            units = len(model.units)
            for cuts in cut_positions(units):
                assert_parts_equal_whole(each, model, cuts)
            (cut if units > 1 and units >= each.layers else whole).append(each.name)
            print(f"{each.name:20} {units:3} units, traced in {took:.1f} s", flush=True)
        except (InputError, AssertionError) as error:
            failed.append(each.name)
            print(
                f"{each.name:20} {type(error).__name__}: {str(error)[:600]}", flush=True
            )
    print(
        f"{len(cut)} of {len(wanted)} are cut into units and equal to the whole; whole: {', '.join(whole) or 'none'};"
    )
    print(f"refused or unequal: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
