"""Fixtures and helpers that several folders of tests import: labs, worlds, recorded runs and networks."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The root of the checkout."""

_WHEEL_FOLDERS = (
    "testbed",
    "agent",
    "controller",
    "images",
    "generation",
    "papers",
    "scenarios",
)


def copy_sources(folder: Path, *extra_folders: str) -> None:
    """Copy the sources of a wheel, and further folders of the checkout, to ``folder``."""
    # A wheel is to be built from sources alone: old build products would hide missing ones.
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in (*_WHEEL_FOLDERS, *extra_folders):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
