"""Wheels that pip builds from sources, unpacked as pip would install them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path


def unpack_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel in ``folder``; return the folder within that holds its content."""
    # Without isolation and index nothing is downloaded.
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", *offline]
    command = [*pip, "--wheel-dir", folder, source]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    content = folder / "packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(content)
    return content
