"""Attack the testbed: random scenarios and faults on either clock, invalid files and messages, signals, lost engines.

    python -m tools.stress [--containers | --files | --messages | --signals] [--seconds 600] [--jobs 2]
        [--first SEED] [--count N] [--only METHOD] [--fresh] [--keep]

Continues after the last seed tried (with --fresh from seed 0). Prints each violation with its seed, reduces the
scenario (except on containers), and writes the reduced scenario to .build/stress/. Exits with 1 after any violation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from testbed.common import yamltext
from tools.stress import containers, files, messages, signals
from tools.stress.check import find_violations
from tools.stress.generate import Tree, random_scenario
from tools.stress.reduce import reduce_scenario

FOLDER = Path(".build/stress")
Attack = Callable[[int], tuple[int, str, list[str]]]
"""Function of a seed that returns the seed, a name for the statistics, and the violations."""
REPEATED = 4
"""One scenario in this many is run twice, and compared with the undivided model."""


def violation_kind(violation: str) -> str:
    """Return the kind of a violation.

    >>> violation_kind("hang: not finished after 120 s of real time")
    'hang'
    """
    return violation.partition(":")[0]


def attack(seed: int) -> tuple[int, str, list[str]]:
    """Simulate a random scenario; return the seed, the method and the violations."""
    # asyncio logs tasks that failed; the oracles report failures that matter.
    logging.disable(logging.ERROR)
    tree = random_scenario(seed)
    violations = find_violations(tree, repeat=seed % REPEATED == 0)
    return seed, tree["workload"]["method"]["name"], violations


def attack_on_containers(seed: int) -> tuple[int, str, list[str]]:
    """Run a random scenario on containers; return the seed, the method and the violations."""
    tree = random_scenario(seed)
    violations = containers.find_violations(tree)
    return seed, tree["workload"]["method"]["name"], violations


def attack_by_file(seed: int) -> tuple[int, str, list[str]]:
    """Read a damaged scenario file; return the seed, the folder of the original scenario and the violations."""
    original, content = files.damaged_file(seed)
    return seed, original.parent.name, files.attack(original, content)


def smallest_scenario(seed: int, kind: str) -> Tree:
    """Return the smallest scenario with the same kind of violation as the scenario of a seed."""
    repeat = kind in ("repetition", "weights")

    def violates(tree: Tree) -> bool:
        violations = find_violations(tree, repeat=repeat)
        return any(violation_kind(each) == kind for each in violations)

    return reduce_scenario(random_scenario(seed), violates)


def to_yaml(tree: Tree) -> bytes:
    """Return a scenario as the content of a file."""
    # Through JSON, as YAML would write shared lists as aliases.
    return yamltext.written(json.loads(json.dumps(tree)), lines=False).encode()


def attack_by_messages(seed: int) -> tuple[int, str, list[str]]:
    """Send a thousand random messages; return the seed, "messages" and the violations."""
    from tools.stress.listeners import listeners

    return seed, "messages", messages.attack(seed, listeners)


def attack_by_signals(seed: int) -> tuple[int, str, list[str]]:
    """Interrupt a run on containers; return the seed, the kind of interruption and the violations."""
    way, after, gap = signals.draw_interruption(seed)
    return seed, way, signals.find_violations(way, after, gap)


@dataclass(frozen=True)
class Way:
    """A way to attack the testbed."""

    attack: Attack
    evidence: Callable[[int, str], bytes]
    """Returns the content of a file that reproduces a violation, given the seed and the kind of violation."""


WAYS = {
    "seed": Way(attack, lambda seed, kind: to_yaml(smallest_scenario(seed, kind))),
    "containers": Way(
        attack_on_containers, lambda seed, _: to_yaml(random_scenario(seed))
    ),
    "file": Way(attack_by_file, lambda seed, _: files.damaged_file(seed)[1]),
    "messages": Way(
        attack_by_messages,
        lambda seed, _: f"{messages.MESSAGES} messages of seed {seed}\n".encode(),
    ),
    "signals": Way(
        attack_by_signals,
        lambda seed, _: f"{signals.draw_interruption(seed)}\n".encode(),
    ),
}
"""Ways to attack, by the name of the file with the next seed."""


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--containers",
        dest="way",
        action="store_const",
        const="containers",
        help="run the scenarios on containers",
    )
    way.add_argument(
        "--files",
        dest="way",
        action="store_const",
        const="file",
        help="read damaged scenario files",
    )
    way.add_argument(
        "--messages",
        dest="way",
        action="store_const",
        const="messages",
        help="send random requests and casts, 1,000 per seed",
    )
    way.add_argument(
        "--signals",
        dest="way",
        action="store_const",
        const="signals",
        help="interrupt runs on containers",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="stop after this time (default 120)",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="number of parallel processes (default 2)"
    )
    parser.add_argument("--first", type=int, help="start with this seed")
    parser.add_argument("--count", type=int, help="maximum number of seeds")
    parser.add_argument("--only", help="only scenarios of this method")
    parser.add_argument("--fresh", action="store_true", help="start with seed 0")
    parser.add_argument(
        "--keep", action="store_true", help="do not write evidence of violations"
    )
    parser.set_defaults(way="seed")
    return parser.parse_args()


def main() -> int:
    """Attack until the time is over or all seeds have been tried; return the exit status."""
    given = parse_arguments()
    way = WAYS[given.way]
    FOLDER.mkdir(parents=True, exist_ok=True)
    next_seed = FOLDER / f"next-{given.way}"
    first = 0
    if given.first is not None:
        first = given.first
    elif next_seed.exists() and not given.fresh:
        first = int(next_seed.read_text())
    seeds = _select_seeds(first, given.count, given.only)
    print(f"seeds from {first}, for {given.seconds:g} s")
    tried = Counter[str]()
    refused = 0
    violation_count = 0
    last = first
    until = time.monotonic() + given.seconds
    for seed, name, violations in run_attacks(way.attack, seeds, given.jobs, until):
        last = max(last, seed)
        tried[name] += 1
        for violation in violations:
            kind = violation_kind(violation)
            if kind == "refused":
                refused += 1
                continue
            violation_count += 1
            print(f"seed {seed}, {name}: {violation}", flush=True)
            if not given.keep:
                path = FOLDER / f"{given.way}-{seed}-{kind}.yaml"
                path.write_bytes(way.evidence(seed, kind))
                print(f"    {path}", flush=True)
        # After each seed, so that an attack that is killed continues from here.
        if given.first is None and given.only is None:
            next_seed.write_text(str(last + 1))
    by_name = ", ".join(f"{name} {count}" for name, count in sorted(tried.items()))
    print(
        f"{tried.total()} tried up to seed {last}: {violation_count} violations, {refused} refused ({by_name})"
    )
    return 1 if violation_count else 0


def _select_seeds(first: int, count: int | None, only: str | None) -> Iterator[int]:
    """Yield seeds from ``first``, at most ``count``; with ``only``, those whose scenario has this method."""
    seeds = itertools.islice(itertools.count(first), count)
    for seed in seeds:
        if only in (None, random_scenario(seed)["workload"]["method"]["name"]):
            yield seed


def run_attacks(
    attack: Attack, seeds: Iterator[int], jobs: int, until: float
) -> Iterator[tuple[int, str, list[str]]]:
    """Attack with several processes; start no attack after ``until``, a time of the monotonic clock."""
    context = get_context("forkserver")
    # Importing these in each process would take longer than many attacks.
    context.set_forkserver_preload(["torch", "testbed_controller.api", __name__])
    with ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1000
    ) as pool:

        def submit(count: int) -> set[Future[tuple[int, str, list[str]]]]:
            return {
                pool.submit(attack, seed) for seed in itertools.islice(seeds, count)
            }

        pending = submit(jobs)
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
            if time.monotonic() <= until:
                pending |= submit(jobs - len(pending))
