"""Networks of the user's: cut where little crosses, the same in parts as whole, refused with the line in the way."""

from __future__ import annotations

import itertools
import math
import re
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
from testbed.ml.models.making import KEY
from testbed.ml.models.own import create_own
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.simulation import simulate
from tests.corpus.architectures import add_tied
from tests.helpers import ROOT
from tests.helpers.deployed import deployment_bodies, read_deployment

NETWORKS = ROOT / "tests" / "helpers" / "own_networks.py"
NAMES = ("ResNet", "UNet", "Transformer", "Gpt", "layered")
SHAPE = (1, 8, 8)


def own(
    name: str,
    file: Path = NETWORKS,
    shape: tuple[int, ...] = SHAPE,
    units=None,
    **options: object,
) -> Model:
    return create_own(usercode.read(file, name, KEY), options, shape, 10, units)


def undivided(name: str, seed: int) -> nn.Module:
    """Return the network as its user would make it."""
    torch.manual_seed(derive(seed, "weights"))
    module: nn.Module = usercode.function(usercode.read(NETWORKS, name, KEY), KEY)(
        SHAPE, 10
    )
    return module


def written(folder: Path, body: str) -> Path:
    file = folder / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n" + body
    )
    return file


def test_units_are_blocks_and_children_of_a_sequential() -> None:
    assert [unit.name for unit in own("ResNet").units] == [
        "conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc",
    ]  # fmt: skip
    assert [unit.name for unit in own("layered").units] == ["1", "2", "3", "5"]
    transformer = own("Transformer")
    assert [unit.name for unit in transformer.units] == [
        "embed", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp", "head",
    ]  # fmt: skip
    assert {
        len(transformer.crossing(cut)) for cut in range(len(transformer.units) + 1)
    } == {1}


def test_skips_are_carried() -> None:
    model = own("UNet")
    up = next(index for index, unit in enumerate(model.units) if unit.name == "up1")
    assert model.reads(up) == (1, up - 1)
    assert [made for made, _ in model.crossing(5)] == [1, 3, 4]
    assert [layer.joins for layer in graph_of(model).layers].count(True) == 2


@pytest.mark.parametrize("name", NAMES)
def test_partitioned_equals_whole(name: str) -> None:
    """Forward, gradients and an update, cut at each place into two and everywhere."""
    model, whole = own(name), undivided(name, seed=5)
    count = len(model.units)
    inputs = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([1, 3, 5, 7])
    expected = whole(inputs)
    nn.functional.cross_entropy(expected, labels).backward()
    torch.optim.SGD(whole.parameters(), lr=0.1).step()
    for cuts in [*([0, cut, count] for cut in range(1, count)), [*range(count + 1)]]:
        parts = [
            model.build(first, last, seed=5) for first, last in itertools.pairwise(cuts)
        ]
        crossing, entered, left = inputs, [], []
        for part in parts:  # as devices do: what crosses is another tensor there
            entered.append(crossing.detach().requires_grad_())
            left.append(part(entered[-1]))
            crossing = left[-1]
        assert torch.equal(left[-1], expected)
        nn.functional.cross_entropy(left[-1], labels).backward()
        for at in range(len(parts) - 2, -1, -1):
            left[at].backward(entered[at + 1].grad)
        add_tied(model, parts)
        found = {}
        for part in parts:
            torch.optim.SGD(part.parameters(), lr=0.1).step()
            found |= {
                name.partition(".")[2]: value
                for name, value in part.state_dict().items()
            }
        assert found.keys() == whole.state_dict().keys()
        for key, value in whole.state_dict().items():
            assert torch.allclose(found[key], value, atol=1e-6), key
    assert model.parameters == sum(each.numel() for each in whole.parameters())


@pytest.mark.parametrize("name", CATALOG)
def test_measured_costs_equal_our_formulas(name: str, tmp_path: Path) -> None:
    pixels = {"alexnet": 224, "vgg16": 224, "yolov2": 64}.get(name, 32)
    ours = create(name, {}, (3, pixels, pixels), 1000 if pixels == 224 else 80)
    file = written(
        tmp_path,
        "from testbed.ml.models import create\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, shape, classes):\n"
        "        super().__init__()\n"
        f"        model = create({name!r}, {{}}, shape, classes)\n"
        "        self.whole = model.build(0, len(model.units), 1)\n"
        "    def forward(self, x):\n"
        f"        return self.whole(x){'.mean((2, 3))[:, :80]' if len(ours.output) > 1 else ''}\n",
    )
    counted = create_own(usercode.read(file, "Net", KEY), {}, ours.input, ours.classes)
    assert (counted.parameters, counted.forward_flops) == (
        ours.parameters,
        ours.forward_flops,
    )
    # Torch makes no copy to flatten; our formulas count each layer's output, that of Flatten too.
    flattened = sum(
        math.prod(entering)
        for unit in ours.units
        for layer, entering in zip(
            unit.layers, shapes_through(unit.layers, unit.input), strict=False
        )
        if isinstance(layer, Flatten)
    )
    kept, formula = (
        sum(unit.activation_bytes for unit in model.units) // 4
        for model in (counted, ours)
    )
    assert kept == pytest.approx(
        formula - flattened, rel=0.005
    )  # dropout makes a mask beside its output
    accessed, formula = (
        cost_of(model.units).of().accessed for model in (counted, ours)
    )
    assert accessed == pytest.approx(formula, rel=0.01)  # joining reads and writes, too
    for kind in KINDS[:4]:
        assert cost_of(counted.units).of([kind]) == cost_of(ours.units).of([kind])


def test_units_named_by_the_user() -> None:
    assert [unit.name for unit in own("ResNet", units=["layer1", "layer2"]).units] == [
        "conv1",
        "layer1",
        "layer2",
    ]
    with pytest.raises(
        InputError,
        match=r"net\w*.py:\d+: no unit can begin at 'layer1.0.conv2': .* 2 tensors",
    ):
        own("ResNet", units=["layer1.0.conv2"])
    with pytest.raises(InputError, match="no module 'nothing'"):
        own("ResNet", units=["nothing"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "        if x.sum() > 0:\n            x = -x\n        return self.fc(x)",
            "net.py:9: branches on values",
        ),
        (
            "        if x.shape[0] > 2:\n            x = -x\n        return self.fc(x)",
            "net.py:9: branches on the number",
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
            "net.py:10: does something else in evaluation",
        ),
        ("        return self.fc(x)", "net.py:9: RuntimeError: [^\n]*$"),
        (
            "        return self.fc(x.flatten(1)), x",
            "net.py:9: forward returns several values: it has to return one tensor",
        ),
        (
            "        return torch.softmax(self.fc(x.flatten(1)), 1)[:, :4]",
            "ends with .4,., not with one value",
        ),
    ],
)
def test_error_names_the_line_that_prevents_tracing(
    tmp_path: Path, body: str, message: str
) -> None:
    head = (
        "class Net(nn.Module):\n    def __init__(self, size=64):\n        super().__init__()\n"
        "        self.fc = nn.Linear(size, 10)\n    def forward(self, x):\n"
    )
    file = written(tmp_path, head + body + "\n")
    with pytest.raises(InputError, match=message):
        own("Net", file)


def test_functions_with_a_training_argument_follow_the_mode(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(64, 10)\n    def forward(self, x):\n"
        "        return F.dropout(self.fc(x.flatten(1)), 0.5, self.training)\n",
    )
    unit = own("Net", file).build(0, 1, seed=1)
    samples = torch.rand(2, *SHAPE)
    assert (unit(samples) == 0).any()
    assert not (unit.eval()(samples) == 0).any()


def test_untraceable_module_can_be_a_unit(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "class Halved(nn.Module):\n    def forward(self, x):\n        while x.norm() > 1:\n            x = x / 2\n"
        "        return x\n"
        "def build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Halved(), nn.Linear(64, 10))\n",
    )
    with pytest.raises(
        InputError,
        match=r"net.py:6: branches on values of a tensor: .* name that in `units`",
    ):
        own("build", file)
    model = own("build", file, units=["2", "3"])
    assert [unit.parameters for unit in model.units] == [65 * 64, 0, 650]
    assert model.build(1, 2, seed=1)(torch.full((2, 64), 9.0)).norm() <= 1


def test_a_layer_without_sizes_is_refused(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "def build():\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))\n",
    )
    with pytest.raises(
        InputError, match=r"net.py: '1' has no sizes yet: call the network once"
    ):
        own("build", file)


def test_options_are_arguments(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "def build(width, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n",
    )
    assert own("build", file, width=3).classes == 10
    with pytest.raises(InputError, match="missing a required argument: 'width'"):
        own("build", file)
    with pytest.raises(InputError, match="there: build"):
        own("make", file)


def test_weights_shared_by_two_places_are_named(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "def build():\n    fc = nn.Linear(64, 64)\n"
        "    return nn.Sequential(nn.Flatten(), fc, nn.Linear(64, 64), fc, nn.Linear(64, 10))\n",
    )
    model = own("build", file)
    assert [unit.parameters for unit in model.units] == [65 * 64] * 3 + [650]
    assert model.parameters == 2 * 65 * 64 + 650
    assert [tied.names for tied in model.tied] == [
        ("0.1.weight", "2.1.weight"),
        ("0.1.bias", "2.1.bias"),
    ]


def test_a_normalisation_with_statistics_on_both_sides_stays_in_one_unit(
    tmp_path: Path,
) -> None:
    file = written(
        tmp_path,
        "def build():\n    norm = nn.BatchNorm1d(64, affine=False)\n    return nn.Sequential(nn.Flatten(), "
        "nn.Linear(64, 64), norm, nn.Linear(64, 64), nn.Linear(64, 64), norm, nn.Linear(64, 10))\n",
    )
    model = own("build", file)
    assert [unit.parameters for unit in model.units] == [65 * 64, 2 * 65 * 64, 650]
    assert re.match(
        r".*net.py.*: no unit can begin here: a normalisation with running statistics",
        model.undivided_reasons[0],
    )


def test_more_stages_than_units_are_refused_with_the_line_that_holds_units_together(
    tmp_path: Path,
) -> None:
    file = scenario(tmp_path, "{name: pipeline, stages: 3}", "Tied")
    (tmp_path / "net.py").write_text(
        "from torch import nn\nclass Tied(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.one, self.two, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)\n"
        "    def forward(self, x):\n        x = self.two(self.one(self.norm(x.flatten(1))))\n"
        "        return self.norm(x)[:, :10]\n"
    )
    with pytest.raises(
        InputError,
        match=r"3 stages, but the model has 1 unit: .*net\.py:\d: no unit can begin here",
    ):
        prepare(trials(load(file))[0])


def test_a_weight_with_two_names_is_trained_by_each_method(tmp_path: Path) -> None:
    body = (
        "def build():\n    first, second = nn.Linear(64, 64), nn.Linear(64, 64)\n    second.weight = first.weight\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(64, 10))\n"
    )
    found = {}
    for method in ("single", "pipeline, stages: 2, micro_batches: 1", "pipedream"):
        file = scenario(tmp_path, f"{{name: {method}}}", "build")
        written(tmp_path, body)
        found[method] = losses(file)
    assert found["pipeline, stages: 2, micro_batches: 1"] == pytest.approx(
        found["single"], rel=1e-5
    )
    assert found["pipedream"][0] == pytest.approx(found["single"][0])


def scenario(folder: Path, method: str, network: str = "Transformer") -> Path:
    file = folder / "mine.yaml"
    (folder / "net.py").write_text(NETWORKS.read_text())
    file.write_text(
        "name: mine\ndevices: {source: {profile: laptop}, worker: {profile: laptop, count: 2}}\n"
        "network: {link: {rate: 100mbit, delay: 1ms}}\n"
        f"workload:\n  model: {{file: net.py, name: {network}}}\n  data: {{name: digits, train: 64, test: 20}}\n"
        f"  method: {method}\n  steps: 4\n  batch_size: 16\n"
    )
    return file


def losses(file: Path) -> list[float]:
    from testbed.ml.data import load as load_data

    prepared = prepare(trials(load(file))[0])
    outcome = simulate(prepared, load_data(prepared.scenario.workload.data))
    assert outcome.status == "finished", outcome.error
    return [event.fields["loss"] for event in outcome.events if event.event == "step"]


def test_a_pipeline_learns_what_a_single_device_does(tmp_path: Path) -> None:
    alone = losses(scenario(tmp_path, "{name: single}", "UNet"))
    divided = losses(
        scenario(tmp_path, "{name: pipeline, micro_batches: 1, stages: 3}", "UNet")
    )
    assert divided == pytest.approx(alone, rel=1e-5)


def test_random_numbers_are_independent_of_the_cuts(tmp_path: Path) -> None:
    network = "Transformer, dropout: 0.3"
    two, three = (
        losses(
            scenario(
                tmp_path,
                f"{{name: pipeline, micro_batches: 2, stages: {stages}}}",
                network,
            )
        )
        for stages in (2, 3)
    )
    assert three == pytest.approx(two, rel=1e-5)


def test_asynchronous_and_collaborative_methods_train_a_user_network(
    tmp_path: Path,
) -> None:
    assert len(losses(scenario(tmp_path, "{name: pipedream}", "ResNet"))) == 4
    file = scenario(tmp_path, "{name: federated}", "ResNet")
    file.write_text(file.read_text().replace("test: 20}", "test: 20, split: iid}"))
    prepared = prepare(trials(load(file))[0])
    assert prepared.plan.devices


def test_a_model_travels_as_text(tmp_path: Path) -> None:
    prepared = prepare(trials(load(scenario(tmp_path, "{name: pipeline}")))[0])
    given = deployment_bodies(prepared)
    (tmp_path / "net.py").unlink()
    for body in given.values():
        assert read_deployment(body)[1].model == prepared.problem.model


def test_of_two_files_with_one_text_each_is_named(tmp_path: Path) -> None:
    text = "class Net(nn.Module):\n    def forward(self, x):\n        return x.flatten(1)[:, :10].add_(1)\n"
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        with pytest.raises(
            InputError,
            match=rf"{folder.name}/net.py:6: .add_\(\) changes a tensor in place",
        ):
            own("Net", written(folder, text))
