"""Pure planners that cut a model's chain of units into the stages of devices in a row.

`cuts` has the dynamic program for any costs; `pipeline` and `asynchronous` give the costs of inference and training;
`memory` the bytes of a stage; `redistribution` the sources of units after a change of the partition.
"""

from testbed.ml.partition.cuts import Cuts
from testbed.ml.partition.pipeline import Chain, SynchronousPipeline

__all__ = ["Chain", "Cuts", "SynchronousPipeline"]
