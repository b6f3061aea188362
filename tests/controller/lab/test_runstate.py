import stat
from dataclasses import replace

import pytest

from testbed.common.errors import InputError
from testbed_controller.lab import runstate


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def a_run(name: str) -> runstate.RunState:
    return runstate.RunState(run=name, token="secret", scenario={"name": "x"})


def test_state_file_is_private_and_read_back():
    runstate.write(a_run("x-1"))
    assert runstate.read("x-1") == a_run("x-1")
    path = runstate.path_of("x-1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["x-1.json"]


def test_state_can_be_forgotten_twice():
    runstate.write(a_run("x-1"))
    runstate.forget("x-1")
    runstate.forget("x-1")
    assert runstate.runs() == []


def test_an_unknown_run_is_refused_with_the_known_ones():
    runstate.write(a_run("x-1"))
    with pytest.raises(InputError, match=r"unknown run 'x-2' \(runs: x-1\)"):
        runstate.read("x-2")


def test_the_only_run_need_not_be_named():
    with pytest.raises(InputError, match="testbed up"):
        runstate.choose(None)
    runstate.write(a_run("x-1"))
    assert runstate.choose(None) == "x-1"
    runstate.write(a_run("x-2"))
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
def test_state_of_another_version_hinders_no_other_run(content, tmp_path):
    runstate.write(replace(a_run("x-1"), results=str(tmp_path / "results")))
    runstate.path_of("x-2").write_text(content)
    with pytest.raises(InputError, match="remove the run with 'testbed down x-2'"):
        runstate.read("x-2")
    assert set(runstate.runs()) == {"x-1", "x-2"}
    assert [state.run for state in runstate.readable()] == ["x-1"]
    assert runstate.writing(tmp_path / "results") == "x-1"
    assert (runstate.hosts_of("x-2"), runstate.results_of("x-2")) == ({}, None)


def test_run_that_is_removed_meanwhile_is_left_out(monkeypatch):
    runstate.write(a_run("x-1"))
    missing = runstate.path_of("x-2")
    folder = runstate.path_of("x-1").parent
    found = [runstate.path_of("x-1"), missing]
    monkeypatch.setattr(type(folder), "glob", lambda *_: iter(found))
    assert runstate.runs() == ["x-1"]
