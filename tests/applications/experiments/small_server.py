"""A small server with faults on order, run as a process of its own.

python small_server.py --port 8000 --fault 'ignores SIGTERM' --fault 'grandchild'
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    faults: frozenset[str] = frozenset()
    began = time.monotonic()
    ready_after_s = 0.0

    def do_GET(self) -> None:
        if "nothing" in self.faults:
            time.sleep(3600)
        if "half an answer" in self.faults:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            self.close_connection = True
            return
        if "endless answer" in self.faults:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                self.wfile.write(b"X-Header: 1\r\n")
                time.sleep(0.05)
        if "redirect" in self.faults and self.path == "/health":
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            return
        ready = time.monotonic() - self.began >= self.ready_after_s
        status = 500 if "500" in self.faults else 200 if ready and "never ready" not in self.faults else 503
        if self.path == "/die":
            os._exit(3)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *arguments: object) -> None:
        pass


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def end() -> None:
    say("orderly end")
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--print", default="")
    parser.add_argument("--log-file", default="")
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--pids", default="")
    parser.add_argument("--tp", default="")
    parser.add_argument("--api-key", default="")
    given = parser.parse_args()
    faults = frozenset(given.fault)
    Handler.faults, Handler.ready_after_s = faults, given.ready_after
    for text in (given.print, os.environ.get("PRINTED", "")):
        if text:
            say(text)
    if given.log_file:
        with Path(given.log_file).open("a") as file:
            file.write("this stands in the log file\n")
    if "dies at start" in faults:
        sys.stderr.write("ValueError: no such model\n")
        sys.exit(7)
    if "killed for memory" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if "ignores SIGTERM" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: end())
    server = ThreadingHTTPServer((given.host, given.port), Handler)
    if "grandchild" in faults:
        # It leaves its parents and its session, ignores signals and keeps the port.
        server.socket.set_inheritable(True)
        code = (
            "import os, signal, socket, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.fork(): os._exit(0)\n"
            "os.setsid()\n"
            "if os.fork(): os._exit(0)\n"
            "time.sleep(3600)"
        )
        subprocess.Popen([sys.executable, "-S", "-c", code], pass_fds=[server.socket.fileno()]).wait()
    if "prints without end" in faults:
        threading.Thread(target=_print_without_end, daemon=True).start()
    if "child" in faults:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])
    say("fired up")
    server.serve_forever()


def _print_without_end() -> None:
    number = 0
    while True:
        sys.stdout.write("".join(f"line {number + more} {'x' * 200}\n" for more in range(100)))
        sys.stdout.flush()
        number += 100


if __name__ == "__main__":
    main()
