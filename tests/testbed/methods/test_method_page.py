"""The page on writing a method shows the example, and the example runs."""

import re

from testbed.prepare import prepare
from testbed.scenario.expand import trials
from testbed.scenario.expect import evaluate
from testbed.scenario.loading import load
from testbed.simulation import simulate
from testbed.trace.metrics import metrics
from testbed.trace.registry import metrics_of
from tests.helpers import ROOT

EXAMPLES = ROOT / "scenarios" / "examples"


def lines(text):
    """Return the lines of a program, without what its place in a class changes of them."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def shown_programs(page):
    """Return the programs of a page, in their order."""
    return re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL
    )


def test_the_page_shows_the_end_of_the_tensor_parallel_example():
    shown = lines(shown_programs("layers.md")[-1])
    assert lines((EXAMPLES / "tensorparallel.py").read_text())[-len(shown) :] == shown


def test_the_page_shows_the_example():
    _, shown, *_ = shown_programs("method.md")  # the first is the ring
    begin = shown.index("async def program")
    messages, program = lines(shown[:begin]), lines(shown[begin:])
    example = lines((EXAMPLES / "mean.py").read_text())
    assert example[example.index(messages[0]) :][: len(messages)] == messages
    assert example[-len(program) :] == program


def test_example_continues_without_the_dead_device():
    prepared = prepare(trials(load(EXAMPLES / "mean.yaml"))[0])
    outcome = simulate(prepared, None)
    assert outcome.status == "finished", outcome.error
    declared = prepared.method.declared
    found = metrics(outcome, prepared.experiment, prepared.plan, declared)
    results = evaluate(prepared.scenario.expect, found, metrics_of(declared))
    assert {result.key for result in results} >= {"late"}
    assert all(result.holds for result in results)
    late = [event.fields["late"] for event in outcome.events if event.event == "mean"]
    assert late[:5] == [0] * 5
    assert late[5:7] == [1, 1]
    assert late[-1] == 0
