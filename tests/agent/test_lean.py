"""What an agent does not import of what it uses."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from testbed_agent import lean

PACKAGE = """
import heavy
from heavy import Base
from heavy.part import make

class Own(Base):
    pass

group = make()
"""
HOLDERS = """
import sys
from types import SimpleNamespace

import testbed_agent.__main__
from testbed_agent import lean
from testbed_agent.control import ControlApplication

runner = SimpleNamespace(
    settings=SimpleNamespace(run="r", device="d", token="t"), state="idle", error=None, device=None,
    log=SimpleNamespace(count=0), pace=SimpleNamespace(factor=1.0), stop=None, leave=None, weights=None,
)
asked = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": "token=t", "SERVER_NAME": "d",
         "SERVER_PORT": "1", "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http"}
answer = b"".join(ControlApplication(runner)(asked, lambda *_: None))
assert b'testbed_state{state="idle"} 1.0' in answer, answer
made = lambda found: getattr(found, "__module__", None) in lean_names or isinstance(found, lean.Placeholder)
from testbed_agent.control import _UNUSED as lean_names
holders = {name.partition(".")[0] for name, module in sys.modules.items() if any(map(made, vars(module).values()))}
heavy = {"_hashlib", "asyncio", "click", "hashlib", "http.server", "jinja2", "ssl", "urllib.request"} & set(sys.modules)
print(sorted(holders), sorted(heavy))
import hashlib, secrets, ssl, tempfile
assert secrets.compare_digest(hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1), b"another") is False
tempfile.TemporaryFile().close()
"""


def test_what_is_imported_without_a_module_works_and_others_have_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "light.py").write_text(PACKAGE)
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("class Base: real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with lean.without("heavy", "heavy.part", "threading"):
        import light  # type: ignore[import-not-found]
    try:
        import heavy  # type: ignore[import-not-found]

        assert heavy.Base.real
        assert not hasattr(light.Own, "real")
        assert isinstance(light.heavy, lean.Placeholder)
        assert sys.modules["threading"] is threading, "what is there already stays"
    finally:
        del sys.modules["light"], sys.modules["heavy"]


def test_placeholders_go_when_an_import_fails() -> None:
    with pytest.raises(ImportError), lean.without("heavy"):
        import none_such  # type: ignore[import-not-found]  # noqa: F401
    assert "heavy" not in sys.modules


def test_an_agent_that_was_asked_has_no_openssl_and_nobody_else_finds_its_placeholders() -> None:
    done = subprocess.run([sys.executable, "-c", HOLDERS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['flask', 'prometheus_client', 'werkzeug'] []"
