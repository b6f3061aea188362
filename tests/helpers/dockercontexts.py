"""Docker contexts in a folder of a test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def context(folder: Path, name: str, url: str, *, use: bool = False) -> None:
    """Write a context as docker does, and with ``use`` make it the current one."""
    place = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    place.mkdir(parents=True)
    written = {
        "Name": name,
        "Metadata": {},
        "Endpoints": {"docker": {"Host": url, "SkipTLSVerify": False}},
    }
    (place / "meta.json").write_text(json.dumps(written))
    if use:
        (folder / "config.json").write_text(json.dumps({"currentContext": name}))
