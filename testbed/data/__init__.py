"""Data sets, and how they are split among devices."""

from testbed.data.catalog import DATASETS, describe, load
from testbed.data.dataset import Dataset

__all__ = ["DATASETS", "Dataset", "describe", "load"]
