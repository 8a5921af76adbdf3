"""An ssh client and a daemon at its far end, over a socket file: what the client sends goes to `sh -c`.

The daemon is a process of its own, so that what it starts descends from nobody here, and a client that
dies leaves it with closed connections, as sshd is left. The far end's loopback is 127.0.0.2.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

FAR = "127.0.0.2"
ROLES = ("in", "out", "err", "exit")


def connect(place: str, header: dict[str, Any]) -> socket.socket:
    """A connection to the daemon, of one stream."""
    held = socket.socket(socket.AF_UNIX)
    held.connect(place)
    held.sendall(json.dumps(header).encode() + b"\n")
    return held


def pump(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source(1 << 16):
            sink(data)


def client(arguments: list[str]) -> int:
    """What `ssh OPTIONS -- HOST COMMAND` does."""
    with Path(os.environ["FAKE_SSH_LOG"]).open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    place = os.environ["FAKE_SSH"]
    rest = list(arguments)
    forwards = []
    while rest and rest[0] != "--":
        option = rest.pop(0)
        if option in ("-o", "-L"):
            value = rest.pop(0)
            forwards += [value] if option == "-L" else []
        elif option not in ("-T", "-a", "-x"):
            sys.stderr.write(f"unknown option {option}\n")
            return 255
    _, host, command = rest
    if host == "refused":
        sys.stderr.write("refused: Permission denied (publickey).\n")
        return 255
    for spec in forwards:
        address, port, _, far_port = spec.split(":")
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, int(port)))
        listener.listen()
        threading.Thread(target=forward, args=(listener, int(far_port)), daemon=True).start()
    name = secrets.token_hex(8)
    streams = {role: connect(place, {"id": name, "role": role, "command": command}) for role in ROLES}

    def send() -> None:
        pump(lambda size: os.read(0, size), streams["in"].sendall)
        with contextlib.suppress(OSError):
            streams["in"].shutdown(socket.SHUT_WR)

    threading.Thread(target=send, daemon=True).start()
    outputs = [
        threading.Thread(target=pump, args=(streams[role].recv, lambda data, to=to: os.write(to, data)))
        for role, to in (("out", 1), ("err", 2))
    ]
    for thread in outputs:
        thread.start()
    code = streams["exit"].recv(100)
    for thread in outputs:
        thread.join(0.5)
    os._exit(int(code) if code else 255)


def forward(listener: socket.socket, port: int) -> None:
    """Hand on connections to the far end's loopback."""
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((FAR, port), 5)
        except OSError:
            near.close()
            continue
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=hand_on, args=(source, sink), daemon=True).start()


def hand_on(source: socket.socket, sink: socket.socket) -> None:
    pump(source.recv, sink.sendall)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def daemon(place: str) -> None:
    """What sshd does: each command gets its streams, and none of the client's processes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    sys.stdout.write("listens\n")
    sys.stdout.flush()
    waiting: dict[str, dict[str, socket.socket]] = {}
    while True:
        held, _ = listener.accept()
        line = b""
        while not line.endswith(b"\n"):
            line += held.recv(1)
        header = json.loads(line)
        streams = waiting.setdefault(header["id"], {})
        streams[header["role"]] = held
        if len(streams) == len(ROLES):
            waiting.pop(header["id"])
            threading.Thread(target=serve, args=(header["command"], streams), daemon=True).start()


def serve(command: str, streams: dict[str, socket.socket]) -> None:
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=streams["in"].fileno(),
        stdout=streams["out"].fileno(),
        stderr=streams["err"].fileno(),
        start_new_session=True,
    )
    for role in ("in", "out", "err"):
        streams[role].close()
    code = process.wait()
    with contextlib.suppress(OSError):
        streams["exit"].sendall(str(code if code >= 0 else 255).encode())
    streams["exit"].close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--daemon"]:
        daemon(sys.argv[2])
    else:
        sys.exit(client(sys.argv[1:]))
