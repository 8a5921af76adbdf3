"""One question to the server of an experiment: bounded, never redirected, by no proxy, soon given up."""

from __future__ import annotations

import http.client
import socket
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from moetune.domain.errors import InputError
from moetune.domain.safe_json import JsonLimits, read_json_object

MAX_ANSWER_BYTES = 8 << 20
LIMIT_S = 5.0

_JSON_LIMITS = JsonLimits(max_bytes=MAX_ANSWER_BYTES)
_OK = 200


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint said.

    Attributes:
        status: of HTTP.
        body: the whole of it.
    """

    status: int
    body: bytes

    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> dict[str, Any]:
        """The JSON object of a good answer, empty for anything else."""
        if self.status != _OK:
            return {}
        try:
            return read_json_object(self.body, "the answer of the server", _JSON_LIMITS).value
        except InputError:
            return {}


def ask(url: str, path: str, limit_s: float = LIMIT_S) -> Answer | None:
    """GET a path of a server; None when it gives no answer, or one that is too long or too slow.

    Args:
        url: `http://HOST:PORT`, as the plan starts the server; nothing that a log or an answer says.
        path: begins with a slash.
        limit_s: for all of it.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme != "http" or not host:
        return None
    connection = http.client.HTTPConnection(host, port or 80, timeout=limit_s)
    try:
        connection.connect()
        with _Alarm(connection.sock, limit_s) as alarm:
            connection.request("GET", path, headers={"Accept": "*/*", "Connection": "close"})
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    # A read of limited size does not complain of a body that ends before its announced length.
    if alarm.rang or len(body) > MAX_ANSWER_BYTES or response.length:
        return None
    return Answer(response.status, body)


class _Alarm:
    """Ends a connection when the time is up: each single wait has a limit, this is that of their sum."""

    def __init__(self, held: socket.socket, limit_s: float) -> None:
        self.rang = False
        self._held = held
        self._timer = threading.Timer(limit_s, self._ring)
        self._timer.daemon = True

    def __enter__(self) -> _Alarm:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _ring(self) -> None:
        self.rang = True
        try:
            self._held.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
