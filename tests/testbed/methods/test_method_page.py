"""Code on documentation pages equals the examples, and the example method runs."""

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


def stripped_lines(text):
    """Return the non-empty lines of a program without indentation, which differs within a class."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def programs_on_page(page):
    """Return the Python programs of a documentation page in order."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_last_program_of_layers_page_ends_tensor_parallel_example():
    program = stripped_lines(programs_on_page("layers.md")[-1])
    example = stripped_lines((EXAMPLES / "tensorparallel.py").read_text())
    assert example[-len(program) :] == program


def test_second_program_of_method_page_is_in_mean_example():
    # The first program is the ring.
    _, text, *_ = programs_on_page("method.md")
    begin = text.index("async def program")
    messages = stripped_lines(text[:begin])
    program = stripped_lines(text[begin:])
    example = stripped_lines((EXAMPLES / "mean.py").read_text())
    first = example.index(messages[0])
    assert example[first : first + len(messages)] == messages
    assert example[-len(program) :] == program


def test_mean_example_continues_without_dead_device():
    prepared = prepare(trials(load(EXAMPLES / "mean.yaml"))[0])
    outcome = simulate(prepared, None)
    assert outcome.status == "finished", outcome.error
    declared = prepared.method.declared
    values = metrics(outcome, prepared.experiment, prepared.plan, declared)
    results = evaluate(prepared.scenario.expect, values, metrics_of(declared))
    assert {result.key for result in results} >= {"late"}
    assert all(result.holds for result in results)
    # The number of late devices in each round: none before the kill, one until the timeout, none afterwards.
    late = [event.fields["late"] for event in outcome.events.of("mean")]
    assert late[:5] == [0] * 5
    assert late[5:7] == [1, 1]
    assert late[-1] == 0
