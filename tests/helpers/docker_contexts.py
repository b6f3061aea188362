"""Docker contexts in a folder of a test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def write_docker_context(
    folder: Path, name: str, url: str, *, is_current: bool = False
) -> None:
    """Write a context as docker does, and with ``is_current`` make it the current one."""
    place = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
    place.mkdir(parents=True)
    written = {
        "Name": name,
        "Metadata": {},
        "Endpoints": {"docker": {"Host": url, "SkipTLSVerify": False}},
    }
    (place / "meta.json").write_text(json.dumps(written))
    if is_current:
        (folder / "config.json").write_text(json.dumps({"currentContext": name}))
