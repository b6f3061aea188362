"""Networks of the user's by layers: rows of known ones are described, others whole, and methods of layers take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from testbed.common import usercode
from testbed.ml.models.chain import Model
from testbed.ml.models.graph import Graph, graph_of
from testbed.ml.models.layers import Dropout
from testbed.ml.models.making import KEY
from testbed.ml.models.own import create_own
from testbed.ml.models.sliced import SlicedLayer, cut_tensors
from testbed.ml.preparation import load_data
from testbed.prepare import Prepared, prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.helpers import ROOT

NETWORKS = ROOT / "tests/helpers/own_networks.py"
OWN = """\
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
INFER = "  task: infer\n  method: {name: METHOD}\n  requests: 4\n  batch_size: 10\n"
TRAIN = "  method: {name: METHOD}\n  training: {optimizer: {learning_rate: 0.5}}\n  batch_size: 20\n  steps: 150\n"


def prepared(
    folder: Path, network: str, work: str, method: str, text: str = OWN
) -> Prepared:
    (folder / "net.py").write_text(text)
    text = SCENARIO.replace("NETWORK", network) + work.replace("METHOD", method)
    (folder / "layers.yaml").write_text(text)
    return prepare(trials(load(folder / "layers.yaml"))[0])


def same_by_layers(model: Model) -> Graph:
    """Hold a network by its layers against the network as it is; return its graph."""
    graph, whole, samples = (
        graph_of(model),
        model.build(0, len(model.units), 3).eval(),
        torch.rand(2, 1, 8, 8),
    )
    made = {-1: samples.flatten(1)}
    with torch.no_grad():
        for index, layer in enumerate(graph.layers):
            tensors = cut_tensors(layer, layer.whole, whole.state_dict())
            made[index] = SlicedLayer(layer, layer.whole, tensors).run(
                torch.cat([made[s] for s in layer.sources], 1)
            )
        assert torch.equal(made[len(graph.layers) - 1], whole(samples).flatten(1))
    return graph


def kinds_of(folder: Path, text: str) -> str:
    """Return of what kinds the layers of a network are, which answers by them as it does."""
    (folder / "net.py").write_text(text)
    graph = same_by_layers(
        create_own(usercode.read(folder / "net.py", "net", KEY), {}, (1, 8, 8), 10)
    )
    found = [
        type(each).__name__ for layer in graph.layers for each in layer.sequence or ()
    ]
    return " ".join(found).replace("CountedUnit", "whole")


@pytest.mark.parametrize("name", ["ResNet", "UNet", "Transformer", "Gpt", "layered"])
def test_described_layers_compute_the_same_as_the_network(name: str) -> None:
    model = create_own(usercode.read(NETWORKS, name, KEY), {}, (1, 8, 8), 10)
    assert same_by_layers(model).weights >= model.weights


def test_rows_of_layers_are_described(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(OWN)
    model = create_own(
        usercode.read(tmp_path / "net.py", "Net", KEY), {}, (1, 8, 8), 10
    )
    found = [
        [type(layer).__name__ for layer in each.sequence]
        for each in graph_of(model).layers
    ]
    pool = ["MaxPool2d"]
    assert found == [
        ["Conv2d", "BatchNorm2d", "LeakyReLU"],
        pool,
        ["Conv2d", "Activation"],
        pool,
        ["Linear"],
    ]
    assert (
        sum(layer.multiplications for layer in graph_of(model).layers)
        == model.multiplications
    )


@pytest.mark.parametrize("network", ["ResNet", "UNet", "Net"])
def test_network_divided_by_layers_answers_as_on_one_device(
    tmp_path: Path, network: str
) -> None:
    found = []
    for method in ("single", "distributed"):
        run = prepared(
            tmp_path,
            network,
            INFER,
            method,
            OWN if network == "Net" else NETWORKS.read_text(),
        )
        outcome = simulate(run, load_data(run))
        assert outcome.status == "finished", outcome.error
        found.append(
            [
                event.fields["loss"]
                for event in outcome.events
                if event.event == "evaluate"
            ]
        )
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0]


@pytest.mark.parametrize(
    ("method", "network"),
    [("edgepipe", "perceptron"), ("versatile", "perceptron"), ("edgepipe", "Plain")],
)
def test_timeslots_train_a_user_network(
    tmp_path: Path, method: str, network: str
) -> None:
    plain = OWN.replace("self.norm(self.one(x))", "self.one(x)").replace(
        "class Net", "class Plain"
    )
    run = prepared(tmp_path, network, TRAIN, method, plain)
    outcome = simulate(run, load_data(run))
    assert outcome.status == "finished", outcome.error
    losses = [
        event.fields["loss"]
        for event in outcome.events
        if event.event == "step" and "loss" in event.fields
    ]
    assert losses[-1] < 0.5 * losses[0]


def test_layer_that_a_method_cannot_divide_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"'layer1\.0' of .* must be a convolution"):
        prepared(tmp_path, "ResNet", TRAIN, "edgepipe", NETWORKS.read_text())


ONE_OF_A_KIND = """\
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
    made = Net()
    made(torch.zeros(2, 1, 8, 8))
    return made
"""


@pytest.mark.parametrize(
    ("module", "body", "kinds"),
    [
        ("nn.Identity()", "F.dropout(x, 0.5, self.training)", "Conv2d Dropout Linear"),
        ("nn.Identity()", "F.dropout(x, 0.5, False)", "Conv2d Linear"),
        ("nn.Identity()", "F.softplus(x)", "Conv2d Activation Linear"),
        ("nn.Identity()", "F.softplus(x, 2.0)", "whole Linear"),
        ("nn.Identity()", "F.gelu(x, approximate='tanh')", "whole Linear"),
        ("nn.Identity()", "F.max_pool2d(x, 3, 2, 0, 1, True)", "whole Linear"),
        ("nn.Identity()", "x.mean((2, 3), keepdim=True)", "whole Linear"),
        (
            "nn.Identity()",
            "torch.mean(x, dim=(-2, -1))",
            "Conv2d GlobalAveragePool2d Linear",
        ),
        ("nn.Identity()", "x.transpose(2, 3)", "whole Linear"),
        ("nn.Hardtanh(0, 5)", "self.own(x)", "Conv2d ReLU Linear"),
        ("nn.Hardtanh(-1, 5)", "self.own(x)", "whole Linear"),
        ("nn.BatchNorm2d(4, eps=0.5)", "self.own(x)", "whole Linear"),
        (
            "nn.Conv2d(4, 4, 3, padding=2, dilation=2)",
            "self.own(x)",
            "Conv2d whole Linear",
        ),
        (
            "nn.Conv2d(4, 4, 3, padding=1, padding_mode='reflect')",
            "self.own(x)",
            "Conv2d whole Linear",
        ),
        (
            "nn.utils.spectral_norm(nn.Conv2d(4, 4, 3))",
            "self.own(x)",
            "Conv2d whole Linear",
        ),
        (
            "nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))",
            "self.own(x)",
            "Conv2d whole Linear",
        ),
    ],
)
def test_modules_unlike_our_layers_are_computed_as_a_whole(
    tmp_path: Path, module: str, body: str, kinds: str
) -> None:
    assert (
        kinds_of(
            tmp_path, ONE_OF_A_KIND.replace("MODULE", module).replace("BODY", body)
        )
        == kinds
    )


@pytest.mark.parametrize(
    "hook",
    [
        "register_forward_hook(lambda m, i, o: 2 * o)",
        "register_forward_pre_hook(twice)",
    ],
)
def test_a_module_with_a_hook_does_more_than_its_layer(
    tmp_path: Path, hook: str
) -> None:
    text = ONE_OF_A_KIND.replace("MODULE", "nn.Conv2d(4, 4, 3)").replace(
        "BODY", "self.own(x)"
    )
    text = text.replace("    return made", f"    made.own.{hook}\n    return made")
    twice = "\ndef twice(module, inputs):\n    return (2 * inputs[0],)\n"
    assert kinds_of(tmp_path, text + twice) == "Conv2d whole Linear"


def test_dropout_active_in_evaluation_stays_in_the_network(
    tmp_path: Path,
) -> None:
    text = ONE_OF_A_KIND.replace("MODULE", "nn.Identity()").replace(
        "BODY", "F.dropout(x)"
    )
    (tmp_path / "net.py").write_text(text)
    model = create_own(
        usercode.read(tmp_path / "net.py", "net", KEY), {}, (1, 8, 8), 10
    )
    assert not any(
        isinstance(each, Dropout)
        for layer in graph_of(model).layers
        for each in layer.sequence or ()
    )
