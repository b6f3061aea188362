"""What several tests share: labs, worlds, recorded runs, networks."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


def copy_sources(folder: Path, *others: str) -> None:
    """Copy what a wheel is made of into a folder, and other folders of the checkout, without what was compiled."""
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    for name in (
        "testbed",
        "agent",
        "controller",
        "images",
        "generation",
        "papers",
        "scenarios",
        *others,
    ):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
