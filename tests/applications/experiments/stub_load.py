# ruff: noqa: PTH123
"""The load generator of the stub server: asks it for one pass and writes the answer."""

from __future__ import annotations

import socket
import sys


def main() -> None:
    host, port, requests, result = sys.argv[1:5]
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(f"GET /pass?n={requests} HTTP/1.1\r\n\r\n".encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head:
        sys.exit(f"the server said {head[:40]!r}")
    with open(result, "wb") as file:
        file.write(body)


if __name__ == "__main__":
    main()
