import stat

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
