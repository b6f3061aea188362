"""Who may ask: agents, shaper and page take requests that bear the token of their run, and no others."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs


def authorised(environ: Mapping[str, Any], token: str) -> bool:
    """Say whether a WSGI request bears the token, compared in constant time.

    As ``Authorization: Bearer <token>``; what only reads may have it as ``token`` in its query instead.
    """
    given = environ.get("HTTP_AUTHORIZATION", "")
    if not given and environ.get("REQUEST_METHOD") == "GET":
        given = "Bearer " + parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())
