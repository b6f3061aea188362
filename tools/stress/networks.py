"""Random neural networks of users: a network that `testbed validate` accepts must run in a simulation.

python -m tools.stress.networks [COUNT] [SEED]
"""

from __future__ import annotations

import random
import sys
import tempfile
import textwrap
import traceback
from collections import Counter
from pathlib import Path

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_controller.api import load, simulate

WIDTHS = (4, 8, 12)
CLASSES = 5
NETWORK_FILE = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
{constructor}

    def forward(self, x):
{forward}
        return x


def load():
    g = torch.Generator().manual_seed(1)
    x = {samples}
    y = torch.randint(0, {classes}, (60{label_positions},), generator=g)
    {ignore_labels}
    return (x[:40], y[:40]), (x[40:], y[40:])
"""
SCENARIO = """
name: random
seed: 1
devices: {{a: {{speed: 1gflops, count: 3}}}}
network: {{topology: mesh, link: {{rate: 50mbit, delay: 1ms}}}}
workload:
  model: {{file: own.py, name: Net}}
  data: {{file: own.py, name: load{split}}}
  method: {method}
  batch_size: {batch}
  steps: 2
  training: {training}
"""
METHODS = (
    "{name: single}",
    "{name: pipeline, stages: 2, micro_batches: 1}",
    "{name: pipeline, stages: 2, micro_batches: 4}",
    "{name: gpipe, stages: 2, micro_batches: 3}",
    "{name: pipedream, stages: 2}",
    "{name: ftpipehd, stages: 2}",
    "{name: federated, local_steps: 1}",
    "{name: split-learning, local_steps: 1}",
)
METHODS_WITH_OWN_DATA = ("federated", "split-learning")
"""Methods whose devices own samples, so the data needs a split."""
TRAINING_OPTIONS = (
    "{}",
    "{optimizer: {name: adam}}",
    "{optimizer: {momentum: 0.9}, clip: {value: 1.0}}",
    "{ema: 0.9}",
)


FUNCTIONAL_STEPS = {
    "skip": "x + torch.relu(x)",
    "noise": "x + 0.1 * torch.randn_like(x)",
    "drop": "F.dropout(x, 0.2)",
}
"""Expressions that need no module and keep the width."""


def layer_kinds(
    width: int, next_width: int, *, has_positions: bool
) -> dict[str, tuple[str, int]]:
    """Return constructor expression and output width of each kind of layer.

    ``has_positions`` means samples that are sequences, of shape (batch, position, width).
    """
    layers = {
        "linear": (f"nn.Linear({width}, {next_width})", next_width),
        # Called twice by `forward`.
        "tied": (f"nn.Linear({width}, {width})", width),
        "double": (f"nn.Linear({width}, {next_width}).double()", next_width),
        "norm": (f"nn.LayerNorm({width})", width),
        "dropout": ("nn.Dropout(0.3)", width),
    }
    if has_positions:
        gru = f"nn.GRU({width}, {next_width}, batch_first=True)"
        attention = f"nn.MultiheadAttention({width}, 2, batch_first=True)"
        layers["gru"] = (gru, next_width)
        layers["attention"] = (attention, width)
    else:
        layers["batch"] = (f"nn.BatchNorm1d({width})", width)
        layers["group"] = (f"nn.GroupNorm(2, {width})", width)
    return layers


def draw_layers(
    draws: random.Random, width: int, *, has_positions: bool
) -> tuple[list[str], list[str], int]:
    """Draw some layers; return the lines of the constructor, the lines of ``forward``, and the output width."""
    constructor = []
    forward = []
    for index in range(draws.randint(1, 4)):
        name = f"self.m{index}"
        next_width = draws.choice(WIDTHS)
        layers = layer_kinds(width, next_width, has_positions=has_positions)
        # "linear" a second time, so that it is drawn more often.
        kind = draws.choice([*layers, "linear", *FUNCTIONAL_STEPS])
        if kind in FUNCTIONAL_STEPS:
            forward.append(f"x = {FUNCTIONAL_STEPS[kind]}")
            continue
        calls = {
            "gru": f"{name}(x)[0]",
            "attention": f"{name}(x, x, x)[0]",
            "tied": f"torch.tanh({name}({name}(x)))",
        }
        call = calls.get(kind, f"{name}(x)")
        # With conversions, a layer in double precision fits its neighbours. Without conversions, validation must reject
        # the mixed precision. The number is drawn for every kind, so that later draws of a seed stay the same.
        if draws.random() < 0.5 and kind == "double":
            call = f"{name}(x.double()).float()"
        expression, width = layers[kind]
        constructor.append(f"{name} = {expression}")
        forward.append(f"x = {call}")
    return constructor, forward, width


def draw_network(draws: random.Random) -> str:
    """Return the text of a Python file with a network and data."""
    kind = draws.choice(("vector", "vector", "tokens", "image"))
    has_positions = draws.random() < 0.5 and kind == "tokens"
    constructor, forward, width = _draw_input(draws, kind, has_positions=has_positions)
    layer_constructors, layer_calls, width = draw_layers(
        draws, width, has_positions=has_positions
    )
    constructor += [*layer_constructors, f"self.head = nn.Linear({width}, {CLASSES})"]
    forward += [*layer_calls, "x = self.head(x)"]
    if draws.random() < 0.1:
        constructor.append(f"self.{draws.choice(('double', 'half', 'bfloat16'))}()")
    samples = {
        "vector": "torch.randn(60, 16, generator=g)",
        "tokens": "torch.randint(0, 20, (60, 7), generator=g)",
        "image": "torch.randn(60, 1, 6, 6, generator=g)",
    }
    ignores_labels = has_positions and draws.random() < 0.5
    return NETWORK_FILE.format(
        constructor=textwrap.indent("\n".join(constructor), " " * 8),
        forward=textwrap.indent("\n".join(forward), " " * 8),
        samples=samples[kind],
        classes=CLASSES,
        label_positions=", 7" if has_positions else "",
        # The class that torch's cross-entropy ignores.
        ignore_labels="y[::3] = -100" if ignores_labels else "",
    )


def _draw_input(
    draws: random.Random, kind: str, *, has_positions: bool
) -> tuple[list[str], list[str], int]:
    """Draw the first layers for a kind of sample; return the same values as `draw_layers`."""
    if kind == "vector":
        return [], [], 16
    width = draws.choice(WIDTHS)
    if kind == "tokens":
        constructor = [f"self.embed = nn.Embedding(20, {width})"]
        call = "x = self.embed(x)" if has_positions else "x = self.embed(x).mean(1)"
        return constructor, [call], width
    constructor = [f"self.conv = nn.Conv2d(1, {width}, 3)"]
    call = "x = self.conv(x).amax((2, 3))"
    if draws.random() < 0.5:
        constructor.append(f"self.norm = nn.BatchNorm2d({width})")
        call = "x = self.norm(F.adaptive_avg_pool2d(self.conv(x), 1)).flatten(1)"
    return constructor, [call], width


def try_network(draws: random.Random, folder: Path) -> str:
    """Validate and run a random network; return the result as text.

    The result is "refused" with the reason, "ran", or "ACCEPTED" with the failure of a run that validation accepted.
    """
    method = draws.choice(METHODS)
    has_own_data = any(name in method for name in METHODS_WITH_OWN_DATA)
    split = ", split: iid" if has_own_data else ""
    keys = {
        "method": method,
        "split": split,
        "batch": draws.choice((1, 3, 4, 8)),
        "training": draws.choice(TRAINING_OPTIONS),
    }
    (folder / "own.py").write_text(draw_network(draws))
    (folder / "random.yaml").write_text(SCENARIO.format(**keys))
    try:
        # The check of `testbed validate`.
        prepare(trials(load(folder / "random.yaml"))[0])
    except InputError as error:
        text = str(error)
        # The reason follows the name of the file, if the message has it.
        reason = text.rpartition("own.py: ")[2]
        return f"refused: {reason[:60]}"
    try:
        outcome = simulate(load(folder / "random.yaml"), out=folder / "run").run.outcome
    except InputError as error:
        return f"ACCEPTED, refused by the run: {error}"
    except Exception:  # noqa: BLE001 - an unexpected exception of any kind is a violation
        return f"ACCEPTED, raised: {traceback.format_exc()[-300:]}"
    if outcome.status == "finished":
        return "ran"
    return f"ACCEPTED, failed: {(outcome.error or '')[-300:]}"


def main(count: int = 200, seed: int = 1) -> int:
    """Try random networks; print accepted networks with a failed run, and the number of networks by result."""
    results: Counter[str] = Counter()
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            result = try_network(random.Random(f"{seed}-{number}"), Path(folder))
            results[result.partition(":")[0]] += 1
            if result.startswith("ACCEPTED"):
                network = (Path(folder) / "own.py").read_text()
                print(f"{number}: {result}\n{network}", flush=True)
                print((Path(folder) / "random.yaml").read_text(), flush=True)
    print(", ".join(f"{kind}: {times}" for kind, times in sorted(results.items())))
    return int(any(kind.startswith("ACCEPTED") for kind in results))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
