"""What docstrings say: what is raised, the shapes of tensors, and whole thoughts instead of fragments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
FILES = sorted(path for top in ("agent", "controller", "testbed", "tools") for path in (ROOT / top).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
TENSOR = re.compile(r"(Tensor|NDArray\[[\w.]+\])( \| None)?\Z")
SHAPE = re.compile(r"\((\w+,|[\w ,-]+, )|\bshapes?\b|\bvector|\bscalar", re.IGNORECASE)
"""A tuple of axes, (samples, classes), or words about the shape."""


def public_functions() -> Iterator[tuple[str, Function]]:
    def within(path: Path, body: list[ast.stmt]) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from within(path, node.body)
            elif isinstance(node, Function) and not node.name.startswith("_"):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node

    for path, tree in TREES.items():
        yield from within(path, tree.body)


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Everything in the body of a function but what is in functions of its own."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def decorators(function: Function) -> str:
    return " ".join(map(ast.unparse, function.decorator_list))


def is_command(function: Function) -> bool:
    """Whether the docstring is what ``--help`` shows, or there is none, as of an overload."""
    return re.search(r"\.(command|group)\b|\bcommand\(|\bgroup\(|overload", decorators(function)) is not None


def test_a_public_function_that_raises_says_what() -> None:
    silent = []
    for place, function in public_functions():
        raises = [node.exc for node in own_nodes(function) if isinstance(node, ast.Raise)]
        raised = [each for each in raises if each is not None and "AssertionError" not in ast.unparse(each)]
        said = re.search(r"\braises?\b", ast.get_docstring(function) or "", re.IGNORECASE)
        if raised and not said and not is_command(function):
            silent.append(f"{place}: raises {ast.unparse(raised[0])[:60]}")
    assert silent == []


def test_a_public_function_of_tensors_says_their_shapes() -> None:
    silent = []
    for place, function in public_functions():
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        kinds = [each.annotation for each in arguments] + [function.returns]
        tensors = [kind for kind in kinds if kind is not None and TENSOR.search(ast.unparse(kind))]
        if tensors and not SHAPE.search(ast.get_docstring(function) or "") and not is_command(function):
            silent.append(f"{place}: {ast.unparse(tensors[0])}")
    assert silent == []


def test_no_docstring_begins_in_the_middle_of_a_thought() -> None:
    """Those of attributes and constants too: "Bytes of the device.", not "Of the device.", and "that are sent."."""
    fragments = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value.value[:60]}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if re.match(r"(Of|That) ", node.value.value)
    ]
    assert fragments == []
