"""Run every method in containers and on the virtual clock, and compare tokens, bytes and times.

    python generation/clocks.py                  # all points of scenarios/clocks.yaml: 15 minutes
    python generation/clocks.py ring petals      # points whose label contains one of these words

The table is that of generation/README.md. Tokens and bytes are equal on any host. Times can be compared only on an idle
host: the verdict says whether the emulation can be trusted.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import testbed

SCENARIO = Path(__file__).with_name("scenarios") / "clocks.yaml"

UNCOMPARED = ("ping", "pong", "release")
"""Messages whose number depends on the duration of a run, or that may be in transit at the end of a run."""

SLACK = 64
"""Bytes by which the size of a message may differ between both clocks.

The simulator assumes the usual number of digits of sequence numbers, and tensors begin at a multiple of 64 bytes.
"""

Route = tuple[str, str, str]
"""Sender, receiver and kind of a message."""


def points() -> dict[str, Mapping[str, Any]]:
    """Return the changed keys of each point of the scenario, by label."""
    changes = {}
    for point in yaml.safe_load(SCENARIO.read_text(encoding="utf-8"))["points"]:
        changes[point.pop("label")] = point
    return changes


def run_point(changes: Mapping[str, Any], runtime: str, out: Path) -> testbed.Result:
    """Run one point of the scenario; ``runtime`` is ``simulate`` or ``emulate``."""
    # Without `points` the scenario has a single run, with the changes of the point.
    scenario = testbed.load(SCENARIO, {**changes, "points": []})
    if runtime == "simulate":
        return testbed.simulate(scenario, out)
    # Links outside their tolerance make the verdict "not trusted"; tokens and bytes are comparable anyway.
    return testbed.emulate(scenario, out, accept_links=True)


def tokens_of(result: testbed.Result) -> dict[int, list[int]]:
    """Return the tokens of each request, by number of the request."""
    tokens: dict[int, list[int]] = defaultdict(list)
    for event in result.run.outcome.events:
        if event.event == "token":
            tokens[event.fields["request"]].append(event.fields["token"])
    return dict(tokens)


def messages_of(result: testbed.Result) -> dict[Route, list[int]]:
    """Return the sizes of all received messages in bytes, by sender, receiver and kind."""
    sizes: dict[Route, list[int]] = defaultdict(list)
    for event in result.run.outcome.events:
        if event.event != "receive" or event.fields["message"] in UNCOMPARED:
            continue
        route = (event.fields["peer"], event.device or "", event.fields["message"])
        sizes[route].append(event.fields["bytes"])
    return dict(sizes)


@dataclass(frozen=True)
class Comparison:
    """The results of one point of the scenario on both clocks."""

    label: str
    simulated: testbed.Result
    containers: testbed.Result

    @property
    def has_same_tokens(self) -> bool:
        """Whether all requests got the same tokens."""
        return tokens_of(self.simulated) == tokens_of(self.containers)

    @property
    def has_fault(self) -> bool:
        """Whether a device is lost. Messages in transit then depend on the time of its death, which differs."""
        return bool(self.simulated.run.experiment.faults)

    def different_messages(self) -> Iterator[str]:
        """Yield each difference in the number or the sizes of messages between both clocks."""
        simulated = messages_of(self.simulated)
        containers = messages_of(self.containers)
        for route in sorted(simulated.keys() | containers.keys()):
            expected = simulated.get(route, [])
            measured = containers.get(route, [])
            # The run ends with the last token. A message of the last step may arrive later, and then is not counted.
            if abs(len(expected) - len(measured)) > 1:
                yield f"{route}: {len(expected)} and {len(measured)} messages"
            for expected_size, size in zip(expected, measured, strict=False):
                if abs(expected_size - size) > SLACK:
                    yield f"{route}: {expected_size} and {size} bytes"

    def row(self) -> str:
        """Return the row of the table."""
        error = self.containers.run.outcome.error
        if error is not None:
            return f"| {self.label} | failed: {error.strip().splitlines()[-1]} |"
        simulated = self.simulated.run.metrics
        containers = self.containers.run.metrics
        received = 0
        for sizes in messages_of(self.containers).values():
            received += sum(sizes)
        cells = (
            self.label,
            "yes" if self.has_same_tokens else "no",
            f"{received / containers['tokens']:,.0f}",
            self._same_messages(),
            f"{simulated['tpot'] * 1000:.1f}",
            f"{containers['tpot'] * 1000:.1f}",
            f"{containers['tpot'] / simulated['tpot']:.2f}",
            containers["verdict"]["kind"],
        )
        return f"| {' | '.join(cells)} |"

    def _same_messages(self) -> str:
        if self.has_fault:
            return ""
        return "no" if list(self.different_messages()) else "yes"


def compare_clocks(label: str, changes: Mapping[str, Any], out: Path) -> Comparison:
    """Run a point on both clocks, and store the results below ``out``."""
    folder = out / label.replace(" ", "-")
    return Comparison(
        label,
        run_point(changes, "simulate", folder / "simulated"),
        run_point(changes, "emulate", folder / "containers"),
    )


HEADER = (
    "| point | same tokens | bytes per token | same messages | simulated (ms) | containers (ms) | ratio | verdict |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="words of labels; default: all points")
    parser.add_argument(
        "--out", type=Path, default=Path("results/clocks"), help="folder of the results"
    )
    options = parser.parse_args(arguments)
    print(HEADER)
    for label, changes in points().items():
        if options.words and not any(word in label for word in options.words):
            continue
        comparison = compare_clocks(label, changes, options.out)
        print(comparison.row(), flush=True)
        if not comparison.has_fault:
            for difference in comparison.different_messages():
                print(f"  {difference}", file=sys.stderr)


if __name__ == "__main__":
    main()
