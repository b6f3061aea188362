"""Ctrl-C while Python frees an object."""

import sys

import pytest

from testbed_controller.cli import main


class RaisingOnDeletion:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "is_printed"), [(KeyboardInterrupt, False), (ValueError, True)]
)
def test_errors_on_deletion_are_printed_except_interrupts(
    error, is_printed, monkeypatch, capfd
):
    monkeypatch.setattr(sys, "unraisablehook", main._drop_interrupt)
    item = RaisingOnDeletion(error)
    # Python cannot raise errors of __del__ and calls the hook.
    del item
    assert ("Traceback" in capfd.readouterr().err) is is_printed
