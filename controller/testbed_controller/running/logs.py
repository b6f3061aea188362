"""Logs of a run on containers, in its results folder: controller.log, and logs/DEVICE.log for each container."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import requests
from docker.errors import APIError
from urllib3.exceptions import HTTPError

from testbed.common.errors import TestbedError
from testbed.common.logs import PACKAGES, LineFormatter
from testbed_controller.hosts.lab import AnyLab

CONTROLLER_LOG = "controller.log"
LOGS_FOLDER = "logs"
"""Subfolder of the container logs, so that no device name can collide with controller.log."""
LOG_BYTES = 1 << 20
"""Maximum size of a saved container log, in bytes; of a longer log, the end is saved."""
WORKERS = 8
"""Number of logs read concurrently."""

_LOG = logging.getLogger(__name__)


class _RunLog(logging.FileHandler):
    """The log handler of one run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop an unwritable record, for example on a full disk, which the run itself reports."""


@contextmanager
def controller_log(results: Path) -> Iterator[None]:
    """Write the controller's log into a run's results folder, with the traceback of a fatal error.

    The levels of the loggers stay unchanged: the command line sets ``info``, and users of the Python API choose theirs.
    """
    handler = _RunLog(results / CONTROLLER_LOG, encoding="utf-8")
    handler.setFormatter(LineFormatter())
    for name in PACKAGES:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    except BaseException:
        # The caller reports the error, but a terminal shows the traceback only at level info.
        _LOG.info("the run ended with an error", exc_info=True)
        raise
    finally:
        for name in PACKAGES:
            logging.getLogger(name).removeHandler(handler)
        handler.close()


def save_container_logs(lab: AnyLab, results: Path) -> None:
    """Write the end of each container's log into a run's results folder; unreadable logs are skipped."""
    folder = results / LOGS_FOLDER
    folder.mkdir(exist_ok=True)

    def save(name: str, pieces: Iterable[bytes]) -> None:
        try:
            (folder / f"{name}.log").write_bytes(_last_bytes(pieces))
        except (TestbedError, APIError, requests.RequestException, HTTPError, OSError):
            _LOG.info("cannot save the log of %s", name, exc_info=True)

    logs = lab.container_logs()
    with ThreadPoolExecutor(WORKERS, "logs") as pool:
        list(pool.map(save, logs.keys(), logs.values()))


def _last_bytes(pieces: Iterable[bytes]) -> bytes:
    """Return at most the last `LOG_BYTES` bytes, which begin at the start of a line."""
    tail = bytearray()
    is_truncated = False
    for piece in pieces:
        tail += piece
        if len(tail) > LOG_BYTES:
            del tail[:-LOG_BYTES]
            is_truncated = True
    if is_truncated:
        # The first line may be incomplete.
        del tail[: tail.find(b"\n") + 1]
    return bytes(tail)
