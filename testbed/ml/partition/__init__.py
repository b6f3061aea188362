"""Pure planners: from costs to plans."""

from testbed.ml.partition.cuts import Cuts
from testbed.ml.partition.pipeline import Chain, SynchronousPipeline

__all__ = ["Chain", "Cuts", "SynchronousPipeline"]
