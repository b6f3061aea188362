"""What the tests of faults share."""

from pathlib import Path

import pytest
from remembered import RememberedLab


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RememberedLab:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RememberedLab()
