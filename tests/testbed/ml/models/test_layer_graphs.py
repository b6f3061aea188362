"""Graphs of layers of users' networks: described layers, opaque modules, and methods that divide layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testbed.common import usercode
from testbed.ml.models.chain import Model
from testbed.ml.models.graph import Graph, graph_of
from testbed.ml.models.maker import MODEL_FILE_KEY
from testbed.ml.models.own import create_own
from testbed.ml.models.sliced import SlicedLayer, cut_tensors
from testbed.ml.preparation import load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.outcome import Outcome
from tests.helpers import ROOT

NETWORKS = ROOT / "tests/helpers/own_networks.py"
SOURCE = """\
import torch
from torch import nn
from torch.nn import functional as F

def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.out = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Linear(32, 10)
    def forward(self, x):
        x = F.max_pool2d(F.leaky_relu(self.norm(self.one(x)), 0.2), 2)
        x = F.max_pool2d(torch.tanh(self.two(x)), 2)
        return self.out(x.view(x.size(0), -1))
"""
SCENARIO = """\
name: layers
seed: 1
devices: {node: {profile: raspberry-pi-4b, count: 4}}
network: {topology: mesh, link: {rate: 50mbit, delay: 2ms}}
workload:
  model: {file: net.py, name: NETWORK}
  data: {name: digits, train: 400, test: 40}
"""
INFERENCE = "  task: infer\n  method: {name: METHOD}\n  requests: 4\n  batch_size: 10\n"
TRAINING = "  method: {name: METHOD}\n  training: {optimizer: {learning_rate: 0.5}}\n  batch_size: 20\n  steps: 150\n"


def prepare_network(
    folder: Path, network: str, workload: str, method: str, source: str = SOURCE
) -> Prepared:
    (folder / "net.py").write_text(source)
    text = SCENARIO.replace("NETWORK", network) + workload.replace("METHOD", method)
    (folder / "layers.yaml").write_text(text)
    return prepare(trials(load(folder / "layers.yaml"))[0])


def run_to_end(prepared: Prepared) -> Outcome:
    outcome = simulate(prepared, load_data(prepared))
    assert outcome.status == "finished", outcome.error
    return outcome


def create_from_file(file: Path, name: str) -> Model:
    return create_own(usercode.read(file, name, MODEL_FILE_KEY), {}, (1, 8, 8), 10)


def create_from_source(folder: Path, source: str, name: str) -> Model:
    (folder / "net.py").write_text(source)
    return create_from_file(folder / "net.py", name)


def assert_layers_equal_network(model: Model) -> Graph:
    """Compute all layers one by one, compare the last output with the network's, and return the graph."""
    graph = graph_of(model)
    network = model.build(0, len(model.units), seed=3).eval()
    samples = torch.rand(2, 1, 8, 8)
    outputs = {-1: samples.flatten(1)}
    with torch.no_grad():
        for index, layer in enumerate(graph.layers):
            tensors = cut_tensors(layer, layer.whole_slice, network.state_dict())
            inputs = torch.cat([outputs[source] for source in layer.sources], 1)
            outputs[index] = SlicedLayer(layer, layer.whole_slice, tensors).run(inputs)
        expected = network(samples).flatten(1)
    assert torch.equal(outputs[len(graph.layers) - 1], expected)
    return graph


def layer_kinds(graph: Graph) -> list[str]:
    """Return the class names of all described layers; an opaque module counts as "whole"."""
    kinds = []
    for layer in graph.layers:
        for description in layer.sequence or ():
            name = type(description).__name__
            kinds.append("whole" if name == "MeasuredUnit" else name)
    return kinds


@pytest.mark.parametrize("name", ["ResNet", "UNet", "Transformer", "Gpt", "layered"])
def test_described_layers_have_outputs_of_network(name: str) -> None:
    model = create_from_file(NETWORKS, name)
    assert assert_layers_equal_network(model).weights >= model.weights


def test_layers_are_grouped_with_normalisation_and_activation(tmp_path: Path) -> None:
    model = create_from_source(tmp_path, SOURCE, "Net")
    layers = graph_of(model).layers
    sequences = []
    for layer in layers:
        sequences.append([type(description).__name__ for description in layer.sequence])
    assert sequences == [
        ["Conv2d", "BatchNorm2d", "LeakyReLU"],
        ["MaxPool2d"],
        ["Conv2d", "Activation"],
        ["MaxPool2d"],
        ["Linear"],
    ]
    multiplications = sum(layer.multiplications for layer in layers)
    assert multiplications == model.multiplications


@pytest.mark.parametrize("network", ["ResNet", "UNet", "Net"])
def test_distributed_inference_has_losses_of_single_device(
    tmp_path: Path, network: str
) -> None:
    source = SOURCE if network == "Net" else NETWORKS.read_text()

    def losses_with(method: str) -> list[float]:
        prepared = prepare_network(tmp_path, network, INFERENCE, method, source)
        evaluations = run_to_end(prepared).events.of("evaluate")
        return [event.fields["loss"] for event in evaluations]

    single = losses_with("single")
    assert single
    assert losses_with("distributed") == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "network"),
    [("edgepipe", "perceptron"), ("versatile", "perceptron"), ("edgepipe", "Plain")],
)
def test_timeslot_methods_train_user_network(
    tmp_path: Path, method: str, network: str
) -> None:
    # Timeslot methods cannot divide a batch normalisation.
    plain = SOURCE.replace("self.norm(self.one(x))", "self.one(x)")
    plain = plain.replace("class Net", "class Plain")
    outcome = run_to_end(prepare_network(tmp_path, network, TRAINING, method, plain))
    losses = []
    for event in outcome.events.of("step"):
        if "loss" in event.fields:
            losses.append(event.fields["loss"])
    assert losses[-1] < 0.5 * losses[0]


def test_layer_that_method_cannot_divide_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"'layer1\.0' of .* must be a convolution"):
        prepare_network(tmp_path, "ResNet", TRAINING, "edgepipe", NETWORKS.read_text())


TEMPLATE = """\
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.own = MODULE
        self.out = nn.LazyLinear(10)
    def forward(self, x):
        x = self.conv(x)
        return self.out(BODY.flatten(1))

def net():
    network = Net()
    network(torch.zeros(2, 1, 8, 8))
    return network
"""
"""A network with one module or operation between a convolution and a linear layer."""


def fill_template(module: str, body: str) -> str:
    return TEMPLATE.replace("MODULE", module).replace("BODY", body)


OWN_MODULE = "self.own(x)"


@pytest.mark.parametrize(
    ("operation", "kinds"),
    [
        ("F.dropout(x, 0.5, self.training)", "Conv2d Dropout Linear"),
        ("F.dropout(x, 0.5, False)", "Conv2d Linear"),
        ("F.softplus(x)", "Conv2d Activation Linear"),
        ("F.softplus(x, 2.0)", "whole Linear"),
        ("F.gelu(x, approximate='tanh')", "whole Linear"),
        ("F.max_pool2d(x, 3, 2, 0, 1, True)", "whole Linear"),
        ("x.mean((2, 3), keepdim=True)", "whole Linear"),
        ("torch.mean(x, dim=(-2, -1))", "Conv2d GlobalAveragePool2d Linear"),
        ("x.transpose(2, 3)", "whole Linear"),
    ],
)
def test_operations_without_equal_layer_are_computed_whole(
    tmp_path: Path, operation: str, kinds: str
) -> None:
    model = create_from_source(
        tmp_path, fill_template("nn.Identity()", operation), "net"
    )
    graph = assert_layers_equal_network(model)
    assert " ".join(layer_kinds(graph)) == kinds


@pytest.mark.parametrize(
    ("module", "kinds"),
    [
        ("nn.Hardtanh(0, 5)", "Conv2d ReLU Linear"),
        ("nn.Hardtanh(-1, 5)", "whole Linear"),
        ("nn.BatchNorm2d(4, eps=0.5)", "whole Linear"),
        ("nn.Conv2d(4, 4, 3, padding=2, dilation=2)", "Conv2d whole Linear"),
        (
            "nn.Conv2d(4, 4, 3, padding=1, padding_mode='reflect')",
            "Conv2d whole Linear",
        ),
        ("nn.utils.spectral_norm(nn.Conv2d(4, 4, 3))", "Conv2d whole Linear"),
        (
            "nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))",
            "Conv2d whole Linear",
        ),
    ],
)
def test_modules_without_equal_layer_are_computed_whole(
    tmp_path: Path, module: str, kinds: str
) -> None:
    model = create_from_source(tmp_path, fill_template(module, OWN_MODULE), "net")
    graph = assert_layers_equal_network(model)
    assert " ".join(layer_kinds(graph)) == kinds


@pytest.mark.parametrize(
    "hook",
    [
        "register_forward_hook(lambda m, i, o: 2 * o)",
        "register_forward_pre_hook(twice)",
    ],
)
def test_module_with_hook_is_computed_whole(tmp_path: Path, hook: str) -> None:
    source = fill_template("nn.Conv2d(4, 4, 3)", OWN_MODULE)
    source = source.replace(
        "    return network", f"    network.own.{hook}\n    return network"
    )
    source += "\ndef twice(module, inputs):\n    return (2 * inputs[0],)\n"
    graph = assert_layers_equal_network(create_from_source(tmp_path, source, "net"))
    assert layer_kinds(graph) == ["Conv2d", "whole", "Linear"]


def test_dropout_active_in_evaluation_stays_in_network(tmp_path: Path) -> None:
    # A Dropout layer would be inactive in evaluation; F.dropout(x) is active always.
    source = fill_template("nn.Identity()", "F.dropout(x)")
    model = create_from_source(tmp_path, source, "net")
    assert "Dropout" not in layer_kinds(graph_of(model))
