"""What several tests share: labs, worlds, recorded runs, networks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
