"""The registry, and that planning imports no torch."""

import subprocess
import sys

import pytest

from testbed.common.errors import InputError
from testbed.method import Method
from testbed.methods import METHODS, get


def test_methods_are_registered_under_their_names():
    assert {"single", "sequential", "pipeline"} <= set(METHODS)
    for name, method in METHODS.items():
        assert isinstance(method, Method)
        task, dot, short = name.rpartition(".")
        assert method.name == short
        assert get(name) is method
        assert get(short, task) is method
        assert not dot or method.tasks == (task,)
        assert "\n" not in method.summary
        assert method.Options()


def test_unknown_method_is_refused_with_the_available_ones():
    with pytest.raises(
        InputError, match="unknown method 'gossip': choose one of single, sequential,"
    ):
        get("gossip")
    with pytest.raises(KeyError):
        METHODS["gossip"]


def test_a_package_brings_a_method_of_the_same_name_for_another_task():
    assert get("sequential", "generate") is METHODS["generate.sequential"]
    assert get("sequential", "infer") is METHODS["sequential"]
    assert get("sequential") is METHODS["sequential"]


def test_planning_imports_no_torch():
    program = """
import sys
from testbed.scenario.expand import trials
from testbed.scenario.loading import load
from testbed.prepare import prepare
for trial in trials(load("scenarios/quickstart.yaml")):
    assert prepare(trial).plan.assignments
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
