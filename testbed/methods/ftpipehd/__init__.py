"""FTPipeHD: asynchronous 1F1B that adapts its partition to the devices as they are, and survives losing them."""

from __future__ import annotations

from testbed.kits.asynchronous.method import AsynchronousMethod
from testbed.kits.asynchronous.partitioners import HomogeneousPartitioner
from testbed.method import Problem
from testbed.methods.ftpipehd.partitioner import AdaptivePartitioner, FTPipeHDOptions


class FTPipeHD(AsynchronousMethod[FTPipeHDOptions]):
    """Begins as PipeDream does, all devices counting as equal; what the run shows decides from then on.

    Normalisation by batch statistics uses those of the batch; its running averages, which only evaluation uses, follow
    the batches in the order of their updates, and are replicated and moved with the weights. Dropout draws by seed,
    unit and batch, so a batch that is done again is the same batch.
    """

    name = "ftpipehd"
    summary = "asynchronous 1F1B, repartitioned to the devices' measured capacities, recovering from replicas"
    Options = FTPipeHDOptions

    def partitioner(self, problem: Problem[FTPipeHDOptions]) -> HomogeneousPartitioner:
        """Return what chooses the partitions."""
        return AdaptivePartitioner(problem)
