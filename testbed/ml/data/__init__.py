"""Data sets, and how they are split among devices."""

from testbed.ml.data.catalog import DATASETS, describe, load
from testbed.ml.data.dataset import Dataset

__all__ = ["DATASETS", "Dataset", "describe", "load"]
