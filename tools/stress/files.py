"""Scenario files that are wrong in random ways: each is refused in few words and little time, or it is a scenario.

Starts from the scenarios that the testbed comes with. A file is changed as text, or as what the text means: values of
other types and sizes, keys that are missing or doubled, bytes that are no text.
"""

from __future__ import annotations

import copy
import math
import random
import resource
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from yaml import YAMLError

from testbed.common import yamltext
from testbed.common.errors import InputError, Key
from testbed.common.formats import escape_control
from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.finding import scenarios_in
from testbed.scenario.loading import load

LONGEST = 2.0
"""Seconds of processor time in which a file is answered, once what it names is imported."""
LARGEST = 500 << 20
"""Bytes by which answering one may let the process grow."""
WORDIEST = 5000
"""Characters that an answer may have."""

HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1,
        10**9,
        10**30,
        10**400,
        -0.0,
        1e308,
        math.inf,
        -math.inf,
        math.nan,
    ),
    *(
        "",
        " ",
        "a",
        "\0",
        "a\0b",
        "\x1b[31m",
        "../../etc/passwd",
        "1" * 10_000,
        "ä" * 300,
        "1e400s",
        "NaN",
        "-5ms",
        "1_000",
    ),
    *(
        [],
        {},
        [[]],
        {"a": {"b": {"c": []}}},
        [None] * 50,
        {"": ""},
        {1: 2},
        "0x10",
        "1e12gbit",
        "100%",
        "1e-300",
    ),
)


SYNTAX = (
    b"{",
    b"]",
    b": ",
    b"- ",
    b"&a ",
    b"*a ",
    b"!!python/none ",
    b"\t",
    b"'",
    b"\n---\n",
)


@cache
def _originals() -> tuple[Path, ...]:
    return tuple(
        sorted(path for path in scenarios_in().values() if path.stat().st_size < 8000)
    )


@cache
def _tree(original: Path) -> Any:
    return yamltext.values(original.read_text())


def file(seed: int) -> tuple[Path, bytes]:
    """Return the scenario that a seed starts from, and what it has become."""
    draw = random.Random(seed)
    original = draw.choice(_originals())
    if draw.random() < 0.4:
        return original, torn(draw, original.read_bytes())
    tree = copy.deepcopy(_tree(original))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        bend(draw, tree)
    return original, _dumped(tree)


def torn(draw: random.Random, content: bytes) -> bytes:
    """Return bytes of which some are changed, or a piece of which is missing, doubled or foreign."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        if not data:
            return b""
        begin = draw.randrange(len(data))
        end = min(len(data), begin + draw.randint(1, 60))
        piece = bytes(data[begin:end])
        match draw.randrange(4):
            case 0:
                data[begin] = draw.randrange(256)
            case 1:
                del data[begin:end]
            case 2:
                data[begin:begin] = piece
            case _:
                data[begin:begin] = draw.choice(SYNTAX)
    return bytes(data)


def bend(draw: random.Random, tree: Any) -> None:
    """Change one value or key of a tree."""
    places = list(_places(tree))
    if not places:
        return
    *way, last = draw.choice(places)
    parent = tree
    for part in way:
        parent = parent[part]
    match draw.randrange(6):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[f"{last}{draw.choice(['', 's', ' ', '_x'])}x"] = parent.pop(last)
        case _:
            parent[last] = copy.deepcopy(
                draw.choice(HOSTILE)
            )  # which may be changed in turn


def _places(tree: Any, way: Key = ()) -> Iterator[Key]:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield (*way, key)
        yield from _places(value, (*way, key))


def _dumped(tree: Any) -> bytes:
    try:
        return yamltext.written(tree).encode()
    except (YAMLError, ValueError):  # nothing that YAML can say
        return b"name: [\n"


def attack(original: Path, content: bytes) -> list[str]:
    """Return what is wrong with the answer to a file that was made of another."""
    with tempfile.TemporaryDirectory() as folder:
        for beside in original.parent.iterdir():
            if beside.is_file() and beside.suffix != ".yaml":
                shutil.copy(beside, folder)
        path = Path(folder, original.name)
        path.write_bytes(content)
        return [
            f"{text} ({original.parent.name}/{original.name})"
            for text in answered(path)
        ]


@cache
def _import() -> None:
    """Have imported what networks and data of one's own need, which takes longer than any answer."""
    for name in ("own", "fromtorch"):
        prepare(trials(load(f"examples/{name}"))[0])


def answered(path: Path) -> Iterator[str]:
    """Yield what is wrong with the answer to a file."""
    _import()
    size, began = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        time.process_time(),
    )
    try:
        for trial in trials(load(path))[:2]:
            prepare(trial)
    except InputError as refused:
        answer = escape_control(str(refused))  # as the command shows it
        if len(answer) > WORDIEST or any(
            not letter.isprintable() and letter not in "\n\t" for letter in answer
        ):
            yield f"words: an answer of {len(answer)} characters: {answer[:200]!r}"
    except Exception:  # noqa: BLE001  (whatever it is, it is what is looked for)
        yield "traceback: " + traceback.format_exc().strip().replace("\n", " | ")[-500:]
    if (took := time.process_time() - began) > LONGEST:
        yield f"time: answered after {took:.1f} s"
    if (
        grown := (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size) << 10
    ) > LARGEST:
        yield f"memory: {grown >> 20} MiB more for an answer"
