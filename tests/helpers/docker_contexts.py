"""Docker contexts in the configuration folder of a test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def write_docker_context(
    folder: Path, name: str, url: str, *, is_current: bool = False
) -> None:
    """Write a context in docker's format; ``is_current`` selects the context."""
    # Docker names the folder of a context by the hash of the context's name.
    digest = hashlib.sha256(name.encode()).hexdigest()
    context_folder = folder / "contexts" / "meta" / digest
    context_folder.mkdir(parents=True)
    metadata = {
        "Name": name,
        "Metadata": {},
        "Endpoints": {"docker": {"Host": url, "SkipTLSVerify": False}},
    }
    (context_folder / "meta.json").write_text(json.dumps(metadata))
    if is_current:
        (folder / "config.json").write_text(json.dumps({"currentContext": name}))
