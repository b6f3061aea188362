"""Random attacks on the testbed: scenarios with faults, damaged files and messages, signals, and losses of the engine.

    python -m tools.stress [--containers | --files | --messages | --signals] [--seconds 600] [--jobs 2]
        [--first SEED | --fresh] [--count N] [--only METHOD] [--report-only]

A seed determines an attack. A violation is a behaviour of the testbed that is wrong for every input, such as a crash.
Without --first or --fresh, seeds continue where the previous command ended. Each violation is printed with the seed; an
attack whose process is killed is a violation too. The first violation of each kind and seed is also written to
.build/stress: as the smallest scenario with the violation if the scenario was simulated, otherwise as the input of the
attack. The exit status is 1 after any violation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from testbed.common import yamltext
from tools.stress import containers, files, messages, signals
from tools.stress.check import find_violations
from tools.stress.generate import OPTIONS, Tree, random_method, random_scenario
from tools.stress.reduce import reduce_scenario

FOLDER = Path(".build/stress")
REPETITION_INTERVAL = 4
"""Every scenario whose seed is a multiple of this number is run twice, and compared with the undivided model."""

KILLED = "killed"
"""Kind of violation of an attack whose process ended without a report, killed by a signal or for its memory."""


class Report(NamedTuple):
    """The result of one attack."""

    seed: int
    label: str
    """Name under which the statistics count the attack, such as the method of the scenario."""
    violations: list[str]
    """One line for each violation, which begins with the kind of violation and a colon."""


Attack = Callable[[int], Report]
"""Function that attacks the testbed with the input of a seed."""


def violation_kind(violation: str) -> str:
    """Return the kind of a violation.

    >>> violation_kind("hang: not finished after 120 s of real time")
    'hang'
    """
    return violation.partition(":")[0]


def attack_simulation(seed: int) -> Report:
    """Simulate a random scenario and apply the oracles to the outcome."""
    # asyncio logs tasks that failed; the oracles report failures that matter.
    logging.disable(logging.ERROR)
    compare = seed % REPETITION_INTERVAL == 0
    violations = find_violations(random_scenario(seed), compare=compare)
    return Report(seed, random_method(seed), violations)


def attack_containers(seed: int) -> Report:
    """Run a random scenario in containers and apply the oracles to the outcome."""
    violations = containers.find_violations(random_scenario(seed))
    return Report(seed, random_method(seed), violations)


def attack_reader(seed: int) -> Report:
    """Read a damaged scenario file; the label is the folder of the original file."""
    original, content = files.damaged_file(seed)
    return Report(seed, original.parent.name, files.attack(original, content))


def attack_listeners(seed: int) -> Report:
    """Send a thousand random messages to the listeners of a run."""
    # Imported here: the listeners import the agent and the shaper, which other attacks do not need.
    from tools.stress.listeners import listeners

    return Report(seed, "messages", messages.attack(seed, listeners))


def attack_command(seed: int) -> Report:
    """Interrupt a run in containers; the label is the kind of interruption."""
    kind, after, gap = signals.draw_interruption(seed)
    return Report(seed, kind, signals.find_violations(kind, after, gap))


def smallest_scenario(seed: int, kind: str) -> Tree:
    """Return the smallest scenario with the same kind of violation as the scenario of a seed."""
    compare = kind in ("repetition", "weights")

    def violates(tree: Tree) -> bool:
        violations = find_violations(tree, compare=compare)
        return any(violation_kind(each) == kind for each in violations)

    return reduce_scenario(random_scenario(seed), violates)


def simulation_evidence(seed: int, kind: str) -> bytes:
    """Return the smallest scenario with a violation; for a killed process, the whole scenario."""
    # The reduction runs the scenario in this process, which would be killed as well.
    if kind == KILLED:
        return to_yaml(random_scenario(seed))
    return to_yaml(smallest_scenario(seed, kind))


def to_yaml(tree: Tree) -> bytes:
    """Return a scenario as the content of a file."""
    # Through JSON, as YAML would write shared lists as aliases.
    return yamltext.written(json.loads(json.dumps(tree)), lines=False).encode()


@dataclass(frozen=True)
class Target:
    """A part of the testbed with its attack, and with the evidence of a violation."""

    attack: Attack
    evidence: Callable[[int, str], bytes]
    """Function that returns the content of a file with the input of an attack, given seed and kind of violation."""
    suffix: str = "yaml"
    """Suffix of the name of that file."""
    has_method: bool = False
    """Whether an attack runs a scenario, and so a method that ``--only`` can select."""


TARGETS = {
    "simulation": Target(attack_simulation, simulation_evidence, has_method=True),
    "containers": Target(
        attack_containers,
        lambda seed, _: to_yaml(random_scenario(seed)),
        has_method=True,
    ),
    "files": Target(attack_reader, lambda seed, _: files.damaged_file(seed)[1]),
    "messages": Target(
        attack_listeners,
        lambda seed, _: f"{messages.MESSAGES} messages of seed {seed}\n".encode(),
        suffix="txt",
    ),
    "signals": Target(
        attack_command,
        lambda seed, _: f"{signals.draw_interruption(seed)}\n".encode(),
        suffix="txt",
    ),
}
"""Targets by name; the names of options and of written files contain these names."""
TARGET_HELP = {
    "containers": "run random scenarios in containers instead of simulating them",
    "files": "read damaged scenario files",
    "messages": "send random requests and casts, 1,000 per seed",
    "signals": "interrupt runs in containers",
}


class Progress:
    """The lowest untried seed, stored in a file.

    Parallel attacks finish in any order. A seed is passed only when all lower seeds have finished, so that an attack
    that is killed later repeats a few seeds and omits none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._finished: set[int] = set()
        self.next_seed = int(path.read_text()) if path.exists() else 0

    def restart(self) -> None:
        """Return to seed 0."""
        self.next_seed = 0

    def finish(self, seed: int) -> None:
        """Count a seed as tried and store the lowest untried seed."""
        self._finished.add(seed)
        while self.next_seed in self._finished:
            self._finished.remove(self.next_seed)
            self.next_seed += 1
        self._path.write_text(str(self.next_seed))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line. Exits with status 2 for a combination of options without meaning."""
    parser = argparse.ArgumentParser(
        prog="stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = parser.add_mutually_exclusive_group()
    for name, text in TARGET_HELP.items():
        target.add_argument(
            f"--{name}", dest="target", action="store_const", const=name, help=text
        )
    parser.set_defaults(target="simulation")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="start no attack after this time (default 120)",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="number of parallel processes (default 2)"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--first", type=int, help="start with this seed, and do not store the progress"
    )
    begin.add_argument("--fresh", action="store_true", help="start with seed 0")
    parser.add_argument("--count", type=int, help="maximum number of attacks")
    parser.add_argument(
        "--only",
        choices=list(OPTIONS),
        metavar="METHOD",
        help="only scenarios of this method; does not store the progress",
    )
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="print violations, but neither reduce nor write their input",
    )
    arguments = parser.parse_args()
    if arguments.only is not None and not TARGETS[arguments.target].has_method:
        parser.error(f"--only cannot be combined with --{arguments.target}: remove it")
    return arguments


def main() -> int:
    """Attack until the time is over or all seeds have been tried; return the exit status."""
    arguments = parse_arguments()
    target = TARGETS[arguments.target]
    FOLDER.mkdir(parents=True, exist_ok=True)
    progress = Progress(FOLDER / f"next-{arguments.target}")
    if arguments.fresh:
        progress.restart()
    first = progress.next_seed if arguments.first is None else arguments.first
    # Selected seeds leave gaps, which a later command has to try.
    stores_progress = arguments.first is None and arguments.only is None
    seeds = select_seeds(first, arguments.count, arguments.only)
    print(f"seeds from {first}, for {arguments.seconds:g} s")
    attack_counts = Counter[str]()
    refused = 0
    violation_count = 0
    last_seed = first
    until = time.monotonic() + arguments.seconds
    for report in run_attacks(target.attack, seeds, arguments.jobs, until):
        # Attacks of several processes end in any order.
        last_seed = max(last_seed, report.seed)
        attack_counts[report.label] += 1
        # Several violations of a kind have one reduced scenario.
        kinds = set()
        for violation in report.violations:
            kind = violation_kind(violation)
            # A random scenario may be invalid, and a refusal is then correct.
            if kind == "refused":
                refused += 1
                continue
            violation_count += 1
            print(f"seed {report.seed}, {report.label}: {violation}", flush=True)
            kinds.add(kind)
        if not arguments.report_only:
            write_evidence(arguments.target, report.seed, sorted(kinds))
        if stores_progress:
            progress.finish(report.seed)
    label_texts = []
    for label, count in sorted(attack_counts.items()):
        label_texts.append(f"{label} {count}")
    print(
        f"{attack_counts.total()} attacks up to seed {last_seed}: {violation_count} violations, {refused} refused "
        f"({', '.join(label_texts)})"
    )
    return 1 if violation_count else 0


def write_evidence(name: str, seed: int, kinds: Sequence[str]) -> None:
    """Write the input of an attack to a file for each kind of violation, and print the paths."""
    target = TARGETS[name]
    for kind in kinds:
        path = FOLDER / f"{name}-{seed}-{kind}.{target.suffix}"
        path.write_bytes(target.evidence(seed, kind))
        print(f"    {path}", flush=True)


def select_seeds(first: int, count: int | None, method: str | None) -> Iterator[int]:
    """Return seeds from ``first`` on, at most ``count``; with a method, only seeds of scenarios with the method.

    >>> list(select_seeds(5, 3, None))
    [5, 6, 7]
    >>> [random_method(seed) for seed in select_seeds(0, 2, "gpipe")]
    ['gpipe', 'gpipe']
    """
    seeds: Iterator[int] = itertools.count(first)
    if method is not None:
        # `random_method` does not draw the whole scenario, whose first random choice is the method.
        seeds = (seed for seed in seeds if random_method(seed) == method)
    return itertools.islice(seeds, count)


def run_attacks(
    attack: Attack, seeds: Iterator[int], jobs: int, until: float
) -> Iterator[Report]:
    """Attack with several processes; start no attack after ``until``, a time of the monotonic clock.

    If a process is killed, each seed under way is tried again in a process of its own, since a pool does not know
    which of its processes ended. The seed that kills its process again is reported as a violation.
    """
    while True:
        unreported = yield from _attack_until_killed(attack, seeds, jobs, until)
        if not unreported:
            return
        names = ", ".join(map(str, unreported))
        print(
            f"a process was killed during seeds {names}: trying each alone", flush=True
        )
        for seed in unreported:
            yield _attack_alone(attack, seed)


def _attack_until_killed(
    attack: Attack, seeds: Iterator[int], jobs: int, until: float
) -> Generator[Report, None, list[int]]:
    """Yield the reports of attacks until a process is killed; return the seeds without a report."""
    under_way: dict[Future[Report], int] = {}
    lost: list[int] = []
    with _make_pool(jobs) as pool:

        def start_attacks(count: int) -> None:
            for seed in itertools.islice(seeds, count):
                try:
                    under_way[pool.submit(attack, seed)] = seed
                except BrokenProcessPool:
                    lost.append(seed)
                    return

        start_attacks(jobs)
        while under_way:
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                seed = under_way.pop(future)
                try:
                    report = future.result()
                except BrokenProcessPool:
                    lost.append(seed)
                else:
                    yield report
            if not lost and time.monotonic() <= until:
                start_attacks(jobs - len(under_way))
    return sorted(lost)


def _attack_alone(attack: Attack, seed: int) -> Report:
    with _make_pool(1) as pool:
        try:
            return pool.submit(attack, seed).result()
        except BrokenProcessPool:
            violation = f"{KILLED}: the process of the attack ended without a report"
            return Report(seed, KILLED, [violation])


def _make_pool(jobs: int) -> ProcessPoolExecutor:
    context = get_context("forkserver")
    # Importing these in each process would take longer than many attacks.
    context.set_forkserver_preload(["torch", "testbed_controller.api", __name__])
    return ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1000)
