"""Fixtures of the tests of scenario files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def write_scenario(tmp_path, monkeypatch):
    """Return a function for writing small.yaml in an empty working directory; the function returns the name."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str | bytes) -> str:
        content = text if isinstance(text, bytes) else text.encode()
        Path("small.yaml").write_bytes(content)
        return "small.yaml"

    return write_text
