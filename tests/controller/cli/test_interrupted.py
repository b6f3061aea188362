"""A Ctrl-C that comes while an object is freed."""

import sys

import pytest

from testbed_controller.cli import main


class Raising:
    """Raises as it is freed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt, False), (ValueError, True)]
)
def test_what_python_drops_is_told_unless_it_is_a_ctrl_c(
    error, said, monkeypatch, capfd
):
    monkeypatch.setattr(sys, "unraisablehook", main._drop_interrupt)
    made = Raising(error)
    del made
    assert ("Traceback" in capfd.readouterr().err) is said
