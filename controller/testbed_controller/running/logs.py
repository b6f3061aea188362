"""The logs of a run on containers, in its results folder: controller.log, and logs/DEVICE.log of each container."""

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
FOLDER = "logs"
"""Folder of the containers' logs; no device can have the name of the file beside it."""
LARGEST_LOG = 1 << 20
"""Bytes of a container's log that are kept: its end."""
WORKERS = 8
"""Logs that are read at once."""

_LOG = logging.getLogger(__name__)


class _RunLog(logging.FileHandler):
    """The controller's log of one run."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drop a record that cannot be written, as on a full disk, of which the run itself reports."""


@contextmanager
def controller_log(results: Path) -> Iterator[None]:
    """Write the controller's log into the results folder of a run, with the traceback of an error that ends it.

    Levels are those of the loggers: ``info`` with the command line, Python's own from Python.
    """
    handler = _RunLog(results / CONTROLLER_LOG, encoding="utf-8")
    handler.setFormatter(LineFormatter())
    for name in PACKAGES:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    except BaseException:
        # Whoever called reports the error: on a terminal its traceback appears only from the level info on.
        _LOG.info("the run ended with an error", exc_info=True)
        raise
    finally:
        for name in PACKAGES:
            logging.getLogger(name).removeHandler(handler)
        handler.close()


def save_container_logs(lab: AnyLab, results: Path) -> None:
    """Write the end of each container's log into the results folder of a run; one that cannot be read is left out."""

    folder = results / FOLDER
    folder.mkdir(exist_ok=True)

    def save(source: tuple[str, Iterable[bytes]]) -> None:
        name, pieces = source
        try:
            (folder / f"{name}.log").write_bytes(_last_bytes(pieces))
        except (TestbedError, APIError, requests.RequestException, HTTPError, OSError):
            _LOG.info("the log of %s cannot be saved", name, exc_info=True)

    with ThreadPoolExecutor(WORKERS, "logs") as pool:
        list(pool.map(save, lab.container_logs().items()))


def _last_bytes(pieces: Iterable[bytes]) -> bytes:
    """Return the end of what an iterable yields, whole lines where it is cut."""
    kept = bytearray()
    cut = False
    for piece in pieces:
        kept += piece
        if len(kept) > LARGEST_LOG:
            del kept[:-LARGEST_LOG]
            cut = True
    return bytes(kept[kept.find(b"\n") + 1 :] if cut else kept)
