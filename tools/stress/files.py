"""Randomly damaged scenario files: each must be valid, or be rejected with a short message in little time.

The originals are the scenarios of the testbed. A file is damaged as text (bytes that are changed, removed or doubled)
or as a tree (values of other types and sizes, keys that are missing or renamed).
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
from collections.abc import Iterable, Iterator
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

MAX_SECONDS = 2.0
"""Maximum processor time in seconds to read a file, after the imports."""
MAX_GROWTH = 500 << 20
"""Maximum growth of the process by reading a file, in bytes."""
MAX_MESSAGE = 5000
"""Maximum length of an error message in characters."""

HOSTILE: tuple[Any, ...] = (
    # Plain values and numbers, some beyond the range of a float.
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
    # Texts: empty, with control characters, long, or almost a number.
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
    # Lists and mappings, empty, nested, or with unusual keys.
    [],
    {},
    [[]],
    {"a": {"b": {"c": []}}},
    [None] * 50,
    {"": ""},
    {1: 2},
    # Quantities at the edge of their range.
    "0x10",
    "1e12gbit",
    "100%",
    "1e-300",
)
"""Values that replace a value of a tree."""


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
"""Characters with a meaning in YAML."""


@cache
def _originals() -> tuple[Path, ...]:
    """Return the scenario files below 8,000 bytes, in a fixed order, so that a seed always chooses the same file."""
    paths = scenarios_in().values()
    return tuple(sorted(path for path in paths if path.stat().st_size < 8000))


@cache
def _tree(original: Path) -> Any:
    return yamltext.values(original.read_text())


def damaged_file(seed: int) -> tuple[Path, bytes]:
    """Return the original scenario file of a seed, and the damaged content."""
    draw = random.Random(seed)
    original = draw.choice(_originals())
    if draw.random() < 0.4:
        return original, damage_bytes(draw, original.read_bytes())
    tree = copy.deepcopy(_tree(original))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        damage_tree(draw, tree)
    return original, _to_yaml(tree)


def damage_bytes(draw: random.Random, content: bytes) -> bytes:
    """Return content with some bytes changed, removed, doubled or inserted."""
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


def damage_tree(draw: random.Random, tree: Any) -> None:
    """Change, rename or remove one value of a tree."""
    paths = list(_paths(tree))
    if not paths:
        return
    *parent_path, key = draw.choice(paths)
    parent = tree
    for part in parent_path:
        parent = parent[part]
    match draw.randrange(6):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[f"{key}{draw.choice(['', 's', ' ', '_x'])}x"] = parent.pop(key)
        case _:
            # A copy, as the next change may be inside the value.
            parent[key] = copy.deepcopy(draw.choice(HOSTILE))


def _paths(tree: Any, parent_path: Key = ()) -> Iterator[Key]:
    """Yield the path of each value of a tree, as keys and indices from the root, depth first."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    for key, value in items:
        path = (*parent_path, key)
        yield path
        yield from _paths(value, path)


def _to_yaml(tree: Any) -> bytes:
    try:
        return yamltext.written(tree).encode()
    except (YAMLError, ValueError):
        # The tree has a value that YAML cannot represent.
        return b"name: [\n"


def attack(original: Path, content: bytes) -> list[str]:
    """Read a damaged file beside the other files of the original scenario; return the violations."""
    with tempfile.TemporaryDirectory() as folder:
        for other in original.parent.iterdir():
            if other.is_file() and other.suffix != ".yaml":
                shutil.copy(other, folder)
        path = Path(folder, original.name)
        path.write_bytes(content)
        name = f"{original.parent.name}/{original.name}"
        return [f"{violation} ({name})" for violation in check_reading(path)]


@cache
def _import_libraries() -> None:
    """Import the libraries of user models and data, which takes longer than reading any file."""
    for name in ("own", "fromtorch"):
        prepare(trials(load(f"examples/{name}"))[0])


def check_reading(path: Path) -> Iterator[str]:
    """Read a scenario file; yield a violation for a crash, a bad message, or much time or memory."""
    _import_libraries()
    size_before = peak_memory()
    began = time.process_time()
    try:
        for trial in trials(load(path))[:2]:
            prepare(trial)
    except InputError as error:
        # As the command line prints the message.
        message = escape_control(str(error))
        letters = message.replace("\n", "").replace("\t", "")
        if len(message) > MAX_MESSAGE or not letters.isprintable():
            yield f"words: a message of {len(message)} characters: {message[:200]!r}"
    except Exception:  # noqa: BLE001 - an unexpected exception of any kind is a violation
        yield "traceback: " + traceback.format_exc().strip().replace("\n", " | ")[-500:]
    seconds = time.process_time() - began
    if seconds > MAX_SECONDS:
        yield f"time: read in {seconds:.1f} s"
    growth = peak_memory() - size_before
    if growth > MAX_GROWTH:
        yield f"memory: {growth >> 20} MiB more to read the file"


def peak_memory() -> int:
    """Return the peak resident memory of the process in bytes."""
    # Linux reports kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
