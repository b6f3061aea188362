"""The registry of methods, and the imports of planning."""

import subprocess
import sys

import pytest

from testbed.common.errors import InputError
from testbed.method import Method
from testbed.methods import METHODS, get


def test_registered_names_resolve_to_methods():
    assert {"single", "sequential", "pipeline"} <= set(METHODS)
    for name, method in METHODS.items():
        assert isinstance(method, Method)
        # A name may have the task as a prefix, as in "generate.sequential".
        task, dot, short = name.rpartition(".")
        assert method.name == short
        assert get(name) is method
        assert get(short, task) is method
        if dot:
            assert method.tasks == (task,)
        assert "\n" not in method.summary
        assert method.Options()


def test_unknown_method_is_rejected_with_available_methods():
    with pytest.raises(
        InputError, match="unknown method 'gossip': choose one of single, sequential,"
    ):
        get("gossip")
    with pytest.raises(KeyError):
        METHODS["gossip"]


def test_method_name_is_resolved_by_task():
    assert get("sequential", "generate") is METHODS["generate.sequential"]
    assert get("sequential", "infer") is METHODS["sequential"]
    assert get("sequential") is METHODS["sequential"]


def test_planning_does_not_import_torch():
    # Importing torch takes seconds, which `plan` and `validate` must not cost.
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
