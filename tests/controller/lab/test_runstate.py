"""State files of runs with containers, from which later commands open a run."""

import stat
from dataclasses import replace

import pytest

from testbed.common.errors import InputError
from testbed_controller.lab import runstate


@pytest.fixture(autouse=True)
def _empty_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def make_state(name: str) -> runstate.RunState:
    return runstate.RunState(run=name, token="secret", scenario={"name": "x"})


def test_state_file_is_private_and_restored():
    runstate.write(make_state("x-1"))
    assert runstate.read("x-1") == make_state("x-1")
    path = runstate.path_of("x-1")
    # The token in it gives access to all devices.
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    # The draft that is renamed at the end is gone.
    assert [file.name for file in path.parent.iterdir()] == ["x-1.json"]


def test_forgotten_state_can_be_forgotten_again():
    # Two commands may remove a run at the same time.
    runstate.write(make_state("x-1"))
    runstate.forget("x-1")
    runstate.forget("x-1")
    assert runstate.runs() == []


def test_unknown_run_is_refused_with_known_runs():
    runstate.write(make_state("x-1"))
    with pytest.raises(InputError, match=r"unknown run 'x-2' \(runs: x-1\)"):
        runstate.read("x-2")


def test_single_run_needs_no_name():
    with pytest.raises(InputError, match="testbed up"):
        runstate.choose(None)
    runstate.write(make_state("x-1"))
    assert runstate.choose(None) == "x-1"
    runstate.write(make_state("x-2"))
    with pytest.raises(InputError, match=r"choose one of .*(x-1, x-2|x-2, x-1)"):
        runstate.choose(None)
    assert runstate.choose("x-2") == "x-2"


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"run": "x-2", "token": "t", "new_field": 1}',
        '{"token": "t"}',
        '{"run": "x-2", "token": "t", "engine": "unix"}',
    ],
)
def test_invalid_state_does_not_affect_other_runs(content, tmp_path):
    # Another version of the testbed may have written the file.
    runstate.write(replace(make_state("x-1"), results=str(tmp_path / "results")))
    runstate.path_of("x-2").write_text(content)
    with pytest.raises(InputError, match="remove the run with 'testbed down x-2'"):
        runstate.read("x-2")
    assert set(runstate.runs()) == {"x-1", "x-2"}
    assert [state.run for state in runstate.readable()] == ["x-1"]
    assert runstate.writing(tmp_path / "results") == "x-1"
    assert (runstate.hosts_of("x-2"), runstate.results_of("x-2")) == ({}, None)


def test_run_removed_in_the_meantime_is_not_listed(monkeypatch):
    runstate.write(make_state("x-1"))
    # The file of x-2 was removed after the folder was read.
    paths = [runstate.path_of("x-1"), runstate.path_of("x-2")]
    monkeypatch.setattr(type(paths[0]), "glob", lambda *_: iter(paths))
    assert runstate.runs() == ["x-1"]
