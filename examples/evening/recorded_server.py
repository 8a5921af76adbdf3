#!/usr/bin/env python3
"""A recorded server: it prints what a release of SGLang or vLLM prints, and computes no token.

It is a real process with a real HTTP server, so that everything around a server can be tried where no
GPU is: it is started and stopped, becomes ready, can die, reads the config directory that its
environment names, and answers the endpoints of its release. What it is to be stands in a recording, a
JSON file: lines in the format of that release, resolved arguments, and how fast it is. THE NUMBERS IN A
RECORDING ARE PLANTED, NOT MEASURED, and the server's first line says so.

Time in it is virtual: a pass of thousands of requests is answered at once, with the times that it would
have taken. They are the same for the same recording, seed and number of the start, which is counted in a
file beside the log.

    python3 recorded_server.py --recording recordings/sglang-0.5.23.json --log LOG -- --port 30000 ...

What stands after `--` is the server's own command line. Faults that a recording does not plant come from
the variable RECORDED_FAULT: see FAULTS.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from recording import Configs, Json, Log, Recording, RefusedError, Times

FAULTS = {
    "die-at-start": "ends with a traceback before it is ready",
    "never-ready": "answers 503 for ever",
    "die-under-load": "ends in the middle of the second pass",
    "killed": "kills itself as the kernel does when memory is short",
    "requests-fail": "completes three quarters of the requests",
    "answer-500": "answers 500 to each pass",
    "ignore-sigterm": "cannot be stopped in an orderly way",
    "hostile-log": "prints control characters, markup and a line of 2 MB",
    "fusion-refused": "FlashInfer's workspace cannot be made",
    "kv-varies": "the KV cache is another one in every start",
}


def hostile_lines() -> list[str]:
    """Lines that attack whoever reads the log."""
    return [
        "\x1b]0;owned\x07\x1b[2J\x1b[31mUsing MoE kernel config from \x1b[0m\x9b2J",
        "[bold red]markup[/] <script>alert(1)</script> \u202egnp.exe",
        "server_args={'model_path': '\x1b[2Jevil\x1b[0m', 'tp_size': " + "[" * 5000,
        "x" * (2 << 20),
        "Capture cuda graph bs [" + "1, " * 100_000 + "1]",
    ]


# --- HTTP ----------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Answers the endpoints of a release, and /recorded/pass."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], recording: Recording, configs: Configs, log: Log) -> None:
        super().__init__(address, Handler)
        self.recording = recording
        self.times = Times(recording, configs)
        self.log = log
        self.ready = False
        self.passes = 0
        self.fault = os.environ.get("RECORDED_FAULT", "")

    def answer(self, path: str) -> tuple[int, object]:
        """Status and body of an endpoint."""
        document = self.recording.document
        if path in ("/health", "/health_generate", "/ping"):
            return (200 if self.ready else 503), {}
        endpoint = document["endpoints"].get(path)
        if endpoint is None:
            return 404, {"detail": "Not Found"}
        return 200, self._filled(endpoint)

    def _filled(self, value: object) -> object:
        """An answer with the facts and arguments of this start in it."""
        if isinstance(value, dict):
            filled = {}
            for name, item in value.items():
                if name == "*arguments":
                    filled.update(self.recording.arguments)
                else:
                    filled[name] = self._filled(item)
            return filled
        if isinstance(value, list):
            return [self._filled(item) for item in value]
        if isinstance(value, str):
            if value.startswith("{") and value.endswith("}") and value[1:-1] in self.recording.facts:
                return self.recording.facts[value[1:-1]]
            return re.sub(
                r"\{(\w+)\}", lambda match: str(self.recording.facts.get(match[1], match[0])), value
            )
        return value

    def one_pass(self, wanted: Json) -> tuple[int, Json]:
        """Answer a whole pass at once."""
        self.passes += 1
        if self.fault == "answer-500":
            return 500, {"error": "internal server error"}
        if self.passes == 2 and self.fault in ("die-under-load", "killed"):
            print("Traceback (most recent call last):", flush=True)  # noqa: T201
            print("torch.AcceleratorError: CUDA error: an illegal memory access", flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)
        sizes = [wanted["requests"], wanted["concurrency"], wanted["input_tokens"], wanted["output_tokens"]]
        if not all(isinstance(size, int) and 0 < size <= 1 << 30 for size in sizes):
            return 422, {"error": "requests, concurrency, input_tokens and output_tokens are whole numbers"}
        result = self.times.of_pass(*sizes)
        if self.fault == "requests-fail":
            result["completed"] = result["requested"] * 3 // 4
        for line in self.recording.document.get("under_load", ()):
            self.log.say(line, running=result["running"], throughput=f"{result['output_tokens_per_s']:.2f}")
        return 200, result


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """An endpoint."""
        self._send(*self.server.answer(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        """A pass."""
        size = int(self.headers.get("Content-Length") or 0)
        if self.path != "/recorded/pass" or not 0 < size < 1 << 16:
            self._send(404, {"detail": "Not Found"})
            return
        try:
            wanted = json.loads(self.rfile.read(size))
            answer = self.server.one_pass(wanted)
        except (ValueError, KeyError, TypeError):
            answer = (422, {"error": "a pass is a JSON object"})
        self._send(*answer)

    def _send(self, status: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: the real servers log them, and nobody reads them."""


# --- start ---------------------------------------------------------------------------------------------


def count_start(log: Path) -> int:
    """The number of this start: a file beside the log counts, under a lock."""
    counter = log.parent / "recorded-starts"
    descriptor = os.open(counter, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read(32).strip()
        number = int(text) + 1 if text.isdigit() else 1
        file.seek(0)
        file.truncate()
        file.write(f"{number}\n")
    return number


def main(arguments: list[str]) -> int:
    """Run until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recording", type=Path, required=True)
    parser.add_argument(
        "--log", type=Path, required=True, help="what it prints; starts are counted beside it"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the noise")
    place = arguments.index("--") if "--" in arguments else len(arguments)
    own = parser.parse_args(arguments[:place])
    document = json.loads(own.recording.read_text())
    sys.stdout = own.log.open("a", buffering=1)
    fault = os.environ.get("RECORDED_FAULT", "")
    if fault and fault not in FAULTS:
        parser.error(f"RECORDED_FAULT is one of: {', '.join(FAULTS)}")
    environ = dict(os.environ)
    try:
        start = count_start(own.log)
        recording = Recording(document, arguments[place + 1 :], environ, start, own.seed)
        if fault == "fusion-refused":
            recording.apply(document["fusion_refused"])
        configs = Configs(recording, environ)
        _die_at_start(fault)
    except RefusedError as refused:
        print("\n".join(refused.lines), flush=True)  # noqa: T201
        return refused.code
    log = Log(recording)
    host, port = recording.given.get("--host", "127.0.0.1"), int(recording.facts["port"])
    server = Server((host, port), recording, configs, log)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if fault == "ignore-sigterm" else _stop)
    signal.signal(signal.SIGINT, _stop)
    if fault == "hostile-log":
        for line in hostile_lines():
            print(line, flush=True)  # noqa: T201
    log.start(configs)
    server.ready = fault != "never-ready"
    try:
        server.serve_forever(poll_interval=0.05)
    finally:
        server.server_close()
    return 0


def _die_at_start(fault: str) -> None:
    if fault == "die-at-start":
        lines = ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory."]
        raise RefusedError(lines)


def _stop(*_: object) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    time.tzset()
    sys.exit(main(sys.argv[1:]))
