"""Attack the testbed: random scenarios and faults on either clock, wrong files and messages, signals and lost engines.

    python -m tools.stress [--containers | --files | --messages | --signals] [--seconds 600] [--jobs 2]
        [--first SEED] [--count N] [--only METHOD] [--fresh] [--keep]

Goes on after the last seed that was tried (--fresh: from 0). Prints each violation with its seed, makes its scenario as
small as it can be (not on containers), and writes that to .build/stress/. Exits with 1 when anything was violated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from testbed.common import yamltext
from tools.stress import containers, files, messages, signals
from tools.stress.check import violations
from tools.stress.generate import Tree, scenario
from tools.stress.reduce import reduced

FOLDER = Path(".build/stress")
Attack = Callable[[int], tuple[int, str, list[str]]]
REPEATED = 4
"""One scenario in this many is run twice, and compared with the undivided model."""


def kind(violation: str) -> str:
    """Return the word that says what kind of violation it is."""
    return violation.partition(":")[0]


def attack(seed: int) -> tuple[int, str, list[str]]:
    """Return the seed, the method of its scenario, and what it violates."""
    logging.disable(
        logging.ERROR
    )  # asyncio's words about tasks; what matters of them is in the violations
    tree = scenario(seed)
    return (
        seed,
        tree["workload"]["method"]["name"],
        violations(tree, repeat=seed % REPEATED == 0),
    )


def attack_on_containers(seed: int) -> tuple[int, str, list[str]]:
    """Do as `attack` does, on containers."""
    tree = scenario(seed)
    return seed, tree["workload"]["method"]["name"], containers.violations(tree)


def attack_by_file(seed: int) -> tuple[int, str, list[str]]:
    """Return the seed, the folder of the scenario that its file was made of, and what is wrong with the answer."""
    original, content = files.file(seed)
    return seed, original.parent.name, files.attack(original, content)


def smallest(seed: int, found: str) -> Tree:
    """Return the smallest scenario that violates the same as that of a seed."""

    def violates(tree: Tree) -> bool:
        return any(
            kind(other) == found
            for other in violations(tree, repeat=found in ("repetition", "weights"))
        )

    return reduced(scenario(seed), violates)


def written(tree: Tree) -> bytes:
    """Return a scenario as a file has it."""
    return yamltext.written(json.loads(json.dumps(tree)), lines=False).encode()


def attack_by_messages(seed: int) -> tuple[int, str, list[str]]:
    """Return the seed, and what is wrong with the answers to its thousand messages."""
    from tools.stress.listeners import listeners

    return seed, "messages", messages.attack(seed, listeners)


def attack_by_signals(seed: int) -> tuple[int, str, list[str]]:
    """Return the seed, what a run on containers is struck by, and what is wrong after that."""
    way, after, gap = signals.drawn(seed)
    return seed, way, signals.violations(way, after, gap)


@dataclass(frozen=True)
class Way:
    """A way to attack: what is done for a seed, and the file that shows what it violated."""

    by: Attack
    shown: Callable[[int, str], bytes]
    """Makes bytes of a seed and a kind of violation."""


WAYS = {
    "seed": Way(attack, lambda seed, found: written(smallest(seed, found))),
    "containers": Way(attack_on_containers, lambda seed, _: written(scenario(seed))),
    "file": Way(attack_by_file, lambda seed, _: files.file(seed)[1]),
    "messages": Way(
        attack_by_messages,
        lambda seed, _: f"{messages.MESSAGES} messages of seed {seed}\n".encode(),
    ),
    "signals": Way(
        attack_by_signals, lambda seed, _: f"{signals.drawn(seed)}\n".encode()
    ),
}
"""By the name under which the next seed is kept."""


def main() -> int:
    """Attack until the time is over or all seeds are tried; return the exit status."""
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
        help="run them on containers",
    )
    way.add_argument(
        "--files",
        dest="way",
        action="store_const",
        const="file",
        help="files that are wrong, which are not run",
    )
    way.add_argument(
        "--messages",
        dest="way",
        action="store_const",
        const="messages",
        help="requests, casts; 1,000 a seed",
    )
    way.add_argument(
        "--signals",
        dest="way",
        action="store_const",
        const="signals",
        help="runs on containers that are ended",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="stop after this time (default 120)",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes side by side (default 2)"
    )
    parser.add_argument("--first", type=int, help="begin with this seed")
    parser.add_argument("--count", type=int, help="try this number of seeds at most")
    parser.add_argument("--only", help="only scenarios of this method")
    parser.add_argument("--fresh", action="store_true", help="begin with seed 0")
    parser.add_argument(
        "--keep", action="store_true", help="do not make scenarios smaller"
    )
    parser.set_defaults(way="seed")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    last_seed = FOLDER / f"next-{given.way}"
    known = int(last_seed.read_text()) if last_seed.exists() and not given.fresh else 0
    first = known if given.first is None else given.first
    seeds = (
        itertools.count(first)
        if given.count is None
        else iter(range(first, first + given.count))
    )
    chosen = (
        seed
        for seed in seeds
        if given.only is None
        or given.only == scenario(seed)["workload"]["method"]["name"]
    )
    print(f"seeds from {first}, for {given.seconds:g} s")
    tried, refused, bad, last = Counter[str](), 0, 0, first
    for seed, method, found in side_by_side(
        WAYS[given.way].by, chosen, given.jobs, time.monotonic() + given.seconds
    ):
        last = max(last, seed)
        tried[method] += 1
        refused += any(kind(each) == "refused" for each in found)
        for violation in found:
            if kind(violation) != "refused":
                bad += 1
                print(f"seed {seed}, {method}: {violation}", flush=True)
                if not given.keep:
                    path = FOLDER / f"{given.way}-{seed}-{kind(violation)}.yaml"
                    path.write_bytes(WAYS[given.way].shown(seed, kind(violation)))
                    print(f"    {path}", flush=True)
        if (
            given.first is None and given.only is None
        ):  # kept now, so that an attack that is killed goes on from here
            last_seed.write_text(str(last + 1))
    by_method = ", ".join(f"{name} {count}" for name, count in sorted(tried.items()))
    print(
        f"{tried.total()} tried up to seed {last}: {bad} violations, {refused} refused ({by_method})"
    )
    return 1 if bad else 0


def side_by_side(
    by: Attack, seeds: Iterator[int], jobs: int, until: float
) -> Iterator[tuple[int, str, list[str]]]:
    """Attack with so many processes; begin nothing after ``until``, an instant of the monotonic clock."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "testbed_controller.api", __name__]
    )  # which takes longer than many seeds
    with ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1000
    ) as pool:
        pending = {pool.submit(by, seed) for seed in itertools.islice(seeds, jobs)}
        while pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
            fresh = 0 if time.monotonic() > until else jobs - len(pending)
            pending |= {
                pool.submit(by, seed) for seed in itertools.islice(seeds, fresh)
            }
