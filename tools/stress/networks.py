"""Random networks of one's own: whatever `validate` accepts must run in a simulation.

python -m tools.stress.networks [COUNT] [SEED]
"""

from __future__ import annotations

import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

from testbed.common.errors import InputError
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed_controller.api import load, simulate

WIDTHS = (4, 8, 12)
CLASSES = 5
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
{made}

    def forward(self, x):
{done}
        return x


def load():
    g = torch.Generator().manual_seed(1)
    x = {samples}
    y = torch.randint(0, {classes}, (60{places},), generator=g)
    {ignored}
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
OWNERS = ("federated", "split-learning")
OPTIMIZERS = (
    "{}",
    "{optimizer: {name: adam}}",
    "{optimizer: {momentum: 0.9}, clip: {value: 1.0}}",
    "{ema: 0.9}",
)


def draw_layers(
    draws: random.Random, width: int, places: bool
) -> tuple[list[str], list[str], int]:
    """Return lines that make and run some layers of a network, and the width of what leaves them."""
    made, done = [], []
    for index in range(draws.randint(1, 4)):
        name, following = f"self.m{index}", draws.choice(WIDTHS)
        layers = {
            "linear": (f"nn.Linear({width}, {following})", following),
            "tied": (f"nn.Linear({width}, {width})", width),
            "double": (f"nn.Linear({width}, {following}).double()", following),
            "norm": (f"nn.LayerNorm({width})", width),
            "dropout": ("nn.Dropout(0.3)", width),
        }
        if places:
            layers |= {
                "gru": (f"nn.GRU({width}, {following}, batch_first=True)", following)
            }
            layers |= {
                "attention": (
                    f"nn.MultiheadAttention({width}, 2, batch_first=True)",
                    width,
                )
            }
        else:
            layers |= {
                "batch": (f"nn.BatchNorm1d({width})", width),
                "group": (f"nn.GroupNorm(2, {width})", width),
            }
        kind = draws.choice([*layers, "linear", "skip", "noise", "drop"])
        if kind in layers:
            text, leaving = layers[kind]
            made.append(f"{name} = {text}")
            calls = {
                "gru": f"{name}(x)[0]",
                "attention": f"{name}(x, x, x)[0]",
                "tied": f"torch.tanh({name}({name}(x)))",
            }
            cast = draws.random() < 0.5 and kind == "double"
            done.append(
                f"x = {name}(x.double()).float()"
                if cast
                else f"x = {calls.get(kind, f'{name}(x)')}"
            )
            width = leaving
        else:
            texts = {
                "skip": "x + torch.relu(x)",
                "noise": "x + 0.1 * torch.randn_like(x)",
                "drop": "F.dropout(x, 0.2)",
            }
            done.append(f"x = {texts[kind]}")
    return made, done, width


def draw_network(draws: random.Random) -> str:
    """Return the text of a file with a network and its data."""
    kind = draws.choice(("vector", "vector", "tokens", "image"))
    width, made, done, places = 16, [], [], draws.random() < 0.5 and kind == "tokens"
    samples = {
        "vector": "torch.randn(60, 16, generator=g)",
        "image": "torch.randn(60, 1, 6, 6, generator=g)",
    }
    if kind == "tokens":
        width = draws.choice(WIDTHS)
        made.append(f"self.embed = nn.Embedding(20, {width})")
        done.append("x = self.embed(x)" if places else "x = self.embed(x).mean(1)")
    if kind == "image":
        width = draws.choice(WIDTHS)
        made.append(f"self.conv = nn.Conv2d(1, {width}, 3)")
        if draws.random() < 0.5:
            made.append(f"self.norm = nn.BatchNorm2d({width})")
            done.append(
                "x = self.norm(F.adaptive_avg_pool2d(self.conv(x), 1)).flatten(1)"
            )
        else:
            done.append("x = self.conv(x).amax((2, 3))")
    more, then, width = draw_layers(draws, width, places)
    made, done = (
        [*made, *more, f"self.head = nn.Linear({width}, {CLASSES})"],
        [*done, *then, "x = self.head(x)"],
    )
    if draws.random() < 0.1:
        made.append(f"self.{draws.choice(('double', 'half', 'bfloat16'))}()")
    return HEAD.format(
        made="\n".join(f"        {line}" for line in made),
        done="\n".join(f"        {line}" for line in done),
        samples=samples.get(kind, "torch.randint(0, 20, (60, 7), generator=g)"),
        classes=CLASSES,
        places=", 7" if places else "",
        ignored="y[::3] = -100" if places and draws.random() < 0.5 else "",
    )


def try_one(draws: random.Random, folder: Path) -> str:
    """Return what came of one network: refused, ran, or how it failed though it was accepted."""
    method = draws.choice(METHODS)
    split = ", split: iid" if any(name in method for name in OWNERS) else ""
    keys = {
        "method": method,
        "split": split,
        "batch": draws.choice((1, 3, 4, 8)),
        "training": draws.choice(OPTIMIZERS),
    }
    (folder / "own.py").write_text(draw_network(draws))
    (folder / "random.yaml").write_text(SCENARIO.format(**keys))
    try:
        prepare(trials(load(folder / "random.yaml"))[0])
    except InputError as error:
        return "refused: " + str(error).partition("own.py: ")[2][:60]
    try:
        outcome = simulate(load(folder / "random.yaml"), out=folder / "run").run.outcome
    except InputError as error:
        return f"ACCEPTED, refused by the run: {error}"
    except Exception:  # noqa: BLE001 - this is what is looked for
        return f"ACCEPTED, raised: {traceback.format_exc()[-300:]}"
    return (
        "ran"
        if outcome.status == "finished"
        else f"ACCEPTED, failed: {(outcome.error or '')[-300:]}"
    )


def main(count: int = 200, seed: int = 1) -> int:
    """Try random networks; print those that were accepted and did not run, and how many there were of each kind."""
    found: Counter[str] = Counter()
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            result = try_one(random.Random(f"{seed}-{number}"), Path(folder))
            found[result.partition(":")[0]] += 1
            if result.startswith("ACCEPTED"):
                print(
                    f"{number}: {result}\n{(Path(folder) / 'own.py').read_text()}",
                    flush=True,
                )
                print((Path(folder) / "random.yaml").read_text(), flush=True)
    print(", ".join(f"{kind}: {times}" for kind, times in sorted(found.items())))
    return int(any(kind.startswith("ACCEPTED") for kind in found))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
