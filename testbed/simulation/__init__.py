"""`testbed.device` on a virtual clock: the whole lab in one process, and no waiting.

What is modelled: compute charged by FLOPs, one processor a device, whose speed may change any time; a link's rate and
delay, framing (`testbed.wire.framing`), what chance does to packets (`crossing`), TCP's window on links that lose
packets (`reno`), retransmission and reconnection; uplinks, downlinks and radio cells (`sharing`); messages under way
together (`channel`); every fault; traces. What is not: TCP's slow start on links without loss, queue limits, connection
set-up, packets that arrive twice, and the time that a device's own software takes.
"""

from pathlib import Path

from testbed.common.errors import InputError
from testbed.simulation.run import simulate

__all__ = ["simulate"]


def check_compiled(folder: Path) -> None:
    """Raise InputError where a compiled module is older than its source, of which it does not do the like any more."""
    for compiled in folder.glob("*.so"):
        source = compiled.with_name(compiled.name.partition(".")[0] + ".py")
        if source.stat().st_mtime > compiled.stat().st_mtime:
            raise InputError(
                f"{source.name} of the simulator has changed since it was compiled: 'make compiled' compiles it again, "
                "'make plain' removes what is compiled"
            )


_FOLDER = Path(__file__).parent
if (_FOLDER.parents[1] / "setup.py").is_file():  # a checkout, in which files change; what is installed is of one piece
    check_compiled(_FOLDER)
