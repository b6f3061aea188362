"""Users' networks: units, costs, tracing errors, and parts against the whole network."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from testbed.common import usercode
from testbed.common.errors import InputError
from testbed.common.seeds import derive
from testbed.device import KINDS
from testbed.ml.models import CATALOG, Model, create
from testbed.ml.models.chain import cost_of
from testbed.ml.models.graph import graph_of
from testbed.ml.models.layers import Flatten, shapes_through
from testbed.ml.models.maker import MODEL_FILE_KEY
from testbed.ml.models.own import create_own
from tests.corpus.architectures import sum_tied_gradients
from tests.helpers import ROOT

NETWORKS = ROOT / "tests" / "helpers" / "own_networks.py"
NAMES = ("ResNet", "UNet", "Transformer", "Gpt", "layered")
SHAPE = (1, 8, 8)
CLASSES = 10
LINEAR_64 = 64 * 64 + 64
"""Parameters of nn.Linear(64, 64)."""


def create_network(
    name: str,
    file: Path = NETWORKS,
    units: Sequence[str] | None = None,
    **options: object,
) -> Model:
    code = usercode.read(file, name, MODEL_FILE_KEY)
    return create_own(code, options, SHAPE, CLASSES, units)


def build_original(name: str, seed: int) -> nn.Module:
    """Return a network built by the user's own code, with the weights of ``seed``."""
    torch.manual_seed(derive(seed, "weights"))
    build = usercode.function(
        usercode.read(NETWORKS, name, MODEL_FILE_KEY), MODEL_FILE_KEY
    )
    network: nn.Module = build(SHAPE, CLASSES)
    return network


def write_network(folder: Path, body: str) -> Path:
    file = folder / "net.py"
    imports = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    file.write_text(imports + body)
    return file


def unit_names(model: Model) -> list[str]:
    return [unit.name for unit in model.units]


def unit_parameters(model: Model) -> list[int]:
    return [unit.parameters for unit in model.units]


# ---------------------------------------------------------------------------------------------------------------- units


def test_units_are_blocks_and_children_of_sequential() -> None:
    assert unit_names(create_network("ResNet")) == [
        "conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc",
    ]  # fmt: skip
    # The Flatten layers 0 and 4 have no weights and join their neighbours.
    assert unit_names(create_network("layered")) == ["1", "2", "3", "5"]


def test_transformer_units_end_where_one_tensor_crosses() -> None:
    model = create_network("Transformer")
    assert unit_names(model) == [
        "embed", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp", "head",
    ]  # fmt: skip
    for cut in range(len(model.units) + 1):
        assert len(model.crossing_tensors(cut)) == 1


def test_skip_connections_of_unet_cross_cuts() -> None:
    model = create_network("UNet")
    up = unit_names(model).index("up1")
    assert model.reads(up) == (1, up - 1)
    assert [index for index, _ in model.crossing_tensors(5)] == [1, 3, 4]
    joins = [layer.is_route for layer in graph_of(model).layers]
    assert joins.count(True) == 2


def test_user_can_name_units() -> None:
    model = create_network("ResNet", units=["layer1", "layer2"])
    assert unit_names(model) == ["conv1", "layer1", "layer2"]


def test_unit_inside_residual_block_is_rejected() -> None:
    message = r"net\w*.py:\d+: no unit can begin at 'layer1.0.conv2': .* 2 tensors"
    with pytest.raises(InputError, match=message):
        create_network("ResNet", units=["layer1.0.conv2"])


def test_unknown_unit_name_is_rejected() -> None:
    with pytest.raises(InputError, match="no module 'nothing'"):
        create_network("ResNet", units=["nothing"])


def test_parameters_of_layer_used_twice_count_once(tmp_path: Path) -> None:
    file = write_network(
        tmp_path,
        "def build():\n    fc = nn.Linear(64, 64)\n"
        "    return nn.Sequential(nn.Flatten(), fc, nn.Linear(64, 64), fc, nn.Linear(64, 10))\n",
    )
    model = create_network("build", file)
    # Both units that use the layer hold its parameters.
    assert unit_parameters(model) == [LINEAR_64] * 3 + [650]
    assert model.parameters == 2 * LINEAR_64 + 650
    assert [tied.names for tied in model.tied_weights] == [
        ("0.1.weight", "2.1.weight"),
        ("0.1.bias", "2.1.bias"),
    ]


def test_layers_between_uses_of_normalisation_are_one_unit(tmp_path: Path) -> None:
    file = write_network(
        tmp_path,
        "def build():\n    norm = nn.BatchNorm1d(64, affine=False)\n    return nn.Sequential(nn.Flatten(), "
        "nn.Linear(64, 64), norm, nn.Linear(64, 64), nn.Linear(64, 64), norm, nn.Linear(64, 10))\n",
    )
    model = create_network("build", file)
    # Two copies of the running statistics would differ.
    assert unit_parameters(model) == [LINEAR_64, 2 * LINEAR_64, 650]
    assert re.match(
        r".*net.py.*: no unit can begin here: a normalisation with running statistics",
        model.undivided_reasons[0],
    )


# ---------------------------------------------------------------------------------------------------------- computation


def compute_parts(
    parts: Sequence[nn.Module], inputs: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Compute forward and backward of successive parts and return the output.

    As on separate devices, each part receives a copy of its inputs without autograd history.
    """
    part_inputs = []
    part_outputs = []
    values = inputs
    for part in parts:
        received = values.detach().requires_grad_()
        values = part(received)
        part_inputs.append(received)
        part_outputs.append(values)
    nn.functional.cross_entropy(values, labels).backward()
    for index in range(len(parts) - 2, -1, -1):
        part_outputs[index].backward(part_inputs[index + 1].grad)
    return values


@pytest.mark.parametrize("name", NAMES)
def test_parts_have_outputs_and_updates_of_whole_network(name: str) -> None:
    model = create_network(name)
    original = build_original(name, seed=5)
    count = len(model.units)
    inputs = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 3, 5, 7])
    expected = original(inputs)
    nn.functional.cross_entropy(expected, labels).backward()
    torch.optim.SGD(original.parameters(), lr=0.1).step()
    # Two parts for each cut, then one part for each unit.
    cuts = [[0, cut, count] for cut in range(1, count)]
    cuts.append(list(range(count + 1)))
    for bounds in cuts:
        parts = []
        for first, last in itertools.pairwise(bounds):
            parts.append(model.build(first, last, seed=5))
        output = compute_parts(parts, inputs, labels)
        assert torch.equal(output, expected)
        sum_tied_gradients(model, parts)
        state = {}
        for part in parts:
            torch.optim.SGD(part.parameters(), lr=0.1).step()
            for unit_name, value in part.state_dict().items():
                state[unit_name.partition(".")[2]] = value
        assert state.keys() == original.state_dict().keys()
        for key, value in original.state_dict().items():
            assert torch.allclose(state[key], value, atol=1e-6), key
    assert model.parameters == sum(weight.numel() for weight in original.parameters())


def flattened_values(model: Model) -> int:
    """Return the number of inputs of all Flatten layers for a sample."""
    total = 0
    for unit in model.units:
        shapes = shapes_through(unit.layers, unit.input)
        # The shapes include the output of the last layer.
        for layer, shape in zip(unit.layers, shapes, strict=False):
            if isinstance(layer, Flatten):
                total += math.prod(shape)
    return total


def activation_values(model: Model) -> int:
    return sum(unit.activation_bytes for unit in model.units) // 4


@pytest.mark.parametrize("name", CATALOG)
def test_measured_costs_equal_formulas_of_catalog(name: str, tmp_path: Path) -> None:
    pixels = {"alexnet": 224, "vgg16": 224, "yolov2": 64}.get(name, 32)
    classes = 1000 if pixels == 224 else 80
    described = create(name, {}, (3, pixels, pixels), classes)
    # A detector has an image of values for each class; a user's network needs one value.
    is_detector = len(described.output) > 1
    reduction = ".mean((2, 3))[:, :80]" if is_detector else ""
    file = write_network(
        tmp_path,
        "from testbed.ml.models import create\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        f"        model = create({name!r}, {{}}, shape, classes)\n"
        "        self.whole = model.build(0, len(model.units), seed=1)\n"
        "    def forward(self, x):\n"
        f"        return self.whole(x){reduction}\n",
    )
    code = usercode.read(file, "Net", MODEL_FILE_KEY)
    measured = create_own(code, {}, described.input, described.classes)
    assert measured.parameters == described.parameters
    assert measured.forward_flops == described.forward_flops
    # torch flattens without a copy, but the formulas count the output of each layer. A
    # measured dropout has a mask beside its output.
    formula = activation_values(described) - flattened_values(described)
    assert activation_values(measured) == pytest.approx(formula, rel=0.005)
    # A measured join reads and writes its tensors.
    accessed = cost_of(described.units).of().accessed
    measured_cost = cost_of(measured.units)
    assert measured_cost.of().accessed == pytest.approx(accessed, rel=0.01)
    for kind in KINDS[:4]:
        assert measured_cost.of([kind]) == cost_of(described.units).of([kind])


def test_dropout_function_with_training_argument_follows_mode(tmp_path: Path) -> None:
    file = write_network(
        tmp_path,
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(64, 10)\n    def forward(self, x):\n"
        "        return F.dropout(self.fc(x.flatten(1)), 0.5, self.training)\n",
    )
    unit = create_network("Net", file).build(0, 1, seed=1)
    samples = torch.rand(2, *SHAPE)
    assert (unit(samples) == 0).any()
    assert not (unit.eval()(samples) == 0).any()


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "        if x.sum() > 0:\n            x = -x\n        return self.fc(x)",
            "net.py:9: branches depending on values",
        ),
        (
            "        if x.shape[0] > 2:\n            x = -x\n        return self.fc(x)",
            "net.py:9: branches depending on the number",
        ),
        (
            "        return self.fc(x.flatten(1)) * x.mean().item()",
            r"net.py:9: .item\(\) reads values",
        ),
        (
            "        x = x.flatten(1)\n        x[:, 0] = 0\n        return self.fc(x)",
            "net.py:10: changes a tensor in place",
        ),
        (
            "        return self.fc(x.flatten(1).add_(1))",
            r"net.py:9: .add_\(\) changes a tensor in place",
        ),
        (
            "        x = self.fc(x.flatten(1))\n        return x * 2 if self.training else x",
            "net.py:10: behaves differently in evaluation",
        ),
        ("        return self.fc(x)", "net.py:9: RuntimeError: [^\n]*$"),
        (
            "        return self.fc(x.flatten(1)), x",
            "net.py:9: forward returns several values: it must return one tensor",
        ),
        (
            "        return torch.softmax(self.fc(x.flatten(1)), 1)[:, :4]",
            "ends with .4,., not with one value",
        ),
    ],
    ids=[
        "branch-on-values",
        "branch-on-batch-size",
        "item",
        "assignment-in-place",
        "method-in-place",
        "branch-on-mode",
        "wrong-shape",
        "several-outputs",
        "too-few-outputs",
    ],
)
def test_error_names_line_that_prevents_tracing(
    tmp_path: Path, body: str, message: str
) -> None:
    # With the three imports of write_network, forward begins in line 8.
    head = (
        "class Net(nn.Module):\n    def __init__(self, size=64):\n        super().__init__()\n"
        "        self.fc = nn.Linear(size, 10)\n    def forward(self, x):\n"
    )
    file = write_network(tmp_path, head + body + "\n")
    with pytest.raises(InputError, match=message):
        create_network("Net", file)


def test_equal_files_are_distinguished_in_errors(tmp_path: Path) -> None:
    text = "class Net(nn.Module):\n    def forward(self, x):\n        return x.flatten(1)[:, :10].add_(1)\n"
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        file = write_network(folder, text)
        message = rf"{folder.name}/net.py:6: .add_\(\) changes a tensor in place"
        with pytest.raises(InputError, match=message):
            create_network("Net", file)


def test_untraceable_module_can_be_a_unit(tmp_path: Path) -> None:
    file = write_network(
        tmp_path,
        "class Halved(nn.Module):\n    def forward(self, x):\n        while x.norm() > 1:\n            x = x / 2\n"
        "        return x\n"
        "def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Halved(), nn.Linear(64, 10))\n",
    )
    message = r"net.py:6: branches depending on values of a tensor: .* name this module in `units`"
    with pytest.raises(InputError, match=message):
        create_network("build", file)
    model = create_network("build", file, units=["2", "3"])
    assert unit_parameters(model) == [LINEAR_64, 0, 650]
    halved = model.build(1, 2, seed=1)
    assert halved(torch.full((2, 64), 9.0)).norm() <= 1


def test_lazy_layer_without_sizes_is_rejected(tmp_path: Path) -> None:
    file = write_network(
        tmp_path,
        "def build():\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))\n",
    )
    message = r"net.py: '1' has no sizes yet: call the network once"
    with pytest.raises(InputError, match=message):
        create_network("build", file)


def test_options_become_arguments(tmp_path: Path) -> None:
    file = write_network(
        tmp_path,
        "def build(width, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n",
    )
    assert create_network("build", file, width=3).classes == CLASSES
    with pytest.raises(InputError, match="missing a required argument: 'width'"):
        create_network("build", file)


def test_unknown_function_is_rejected_with_available_names(tmp_path: Path) -> None:
    file = write_network(tmp_path, "def build():\n    return nn.Flatten()\n")
    with pytest.raises(InputError, match="available: build"):
        create_network("make", file)
