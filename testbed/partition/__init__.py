"""Pure planners: costs in, plan out."""

from testbed.partition.cuts import Cuts
from testbed.partition.pipeline import Chain, SynchronousPipeline

__all__ = ["Chain", "Cuts", "SynchronousPipeline"]
