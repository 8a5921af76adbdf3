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
import math
import os
import random
import re
import signal
import sys
import time
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
_LARGEST_DECODE = 512
FIRST_EVENING = datetime(2026, 1, 1, 20, 0, 0)


# --- the recording, and what the command line and the variables make of it -----------------------------


class RefusedError(Exception):
    """The server ends before it is ready, as that release does."""

    def __init__(self, lines: list[str], code: int = 1) -> None:
        super().__init__(lines[-1])
        self.lines = lines
        self.code = code


class Recording:
    """A recording with the effects of a command line and of an environment.

    Attributes:
        arguments: resolved, by name.
        facts: numbers and texts that the lines hold, by name.
        scale: what times are multiplied by.
        given: flags of the command line, named: the same as vLLM prints them.
        extra: lines by the moment at which they are printed.
    """

    def __init__(
        self, document: dict, argv: list[str], environ: dict[str, str], start: int, seed: int
    ) -> None:
        self.document = document
        self.start = start
        self.arguments = dict(document["arguments"])
        self.facts = dict(document["facts"])
        self.scale = {"ttft": 1.0, "itl": 1.0}
        self.extra: dict[str, list[str]] = {}
        self.random = random.Random(f"{seed}:{start}")
        if "random_seed" in self.arguments:
            self.arguments["random_seed"] = self.random.randrange(1 << 30)
        self.given: dict[str, str] = {}
        self.named: dict[str, object] = {}
        self._read_command(argv)
        self.facts["port"] = self.given.get("--port", "30000")
        for name, effects in document.get("variables", {}).items():
            if name in environ:
                self.apply(effects.get(environ[name]) or effects.get("*") or {})
        self.facts["kv_tokens"] = self._noisy_kv(environ.get("RECORDED_FAULT", ""))
        self._move()

    def _read_command(self, argv: list[str]) -> None:
        flags = self.document["flags"]
        place = 0
        while place < len(argv):
            flag, equals, value = argv[place].partition("=")
            known = flags.get(flag)
            if known is None:
                raise RefusedError([self.document["unknown_flag"].replace("{flag}", argv[place])], 2)
            place += 1
            if known.get("takes", 1):
                if not equals:
                    if place >= len(argv):
                        raise RefusedError([f"error: argument {flag}: expected one argument"], 2)
                    value = argv[place]
                    place += 1
            else:
                value = "true"
            self.given[flag] = value
            name = known.get("argument", flag.lstrip("-").replace("-", "_"))
            if name:
                self.arguments[name] = _typed(value)
            if "fact" in known:
                self.facts[known["fact"]] = int(value)
            if "given" in known:
                self.named[known["given"]] = _typed(value)
            self.apply(known.get("effect", {}))
            self.apply(known.get("effects", {}).get(value, {}))

    def apply(self, effect: dict) -> None:
        """`set` facts, `arguments`, `scale` times and numbers, add `lines`, or `refuse` to start."""
        if "refuse" in effect:
            raise RefusedError(list(effect["refuse"]))
        self.arguments.update(effect.get("arguments", {}))
        self.facts.update(effect.get("set", {}))
        for name, factor in effect.get("scale", {}).items():
            if name in self.scale:
                self.scale[name] *= factor
            else:
                self.facts[name] = int(self.facts[name] * factor)
        for moment, lines in effect.get("lines", {}).items():
            self.extra.setdefault(moment, []).extend(lines)

    def _noisy_kv(self, fault: str) -> int:
        """Free memory is never quite the same; the seed decides."""
        spread = 0.2 if fault == "kv-varies" else self.document["noise"]["kv_tokens"]
        tokens = self.facts["kv_tokens"] * (1 + self.random.uniform(-spread, spread))
        page = self.document.get("page", 16)
        return int(tokens) // page * page

    def _move(self) -> None:
        """How fast this start is, by itself."""
        noise = self.document["noise"]
        self.speed = math.exp(self.random.gauss(0, noise["between_starts"]))


def _typed(text: str) -> object:
    for word, value in (("true", True), ("false", False), ("none", None)):
        if text.lower() == word:
            return value
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _filled(template: str, facts: dict) -> str:
    """A text with facts for the names in braces."""
    return re.sub(r"\{(\w+)\}", lambda match: str(facts.get(match[1], match[0])), template)


# --- config files --------------------------------------------------------------------------------------


class Configs:
    """Looks for config files as the release does, and says what was read.

    Attributes:
        lines: that the lookup prints.
        up: the table that the up kernel runs with, None: the default.
        down: likewise.
    """

    def __init__(self, recording: Recording, environ: dict[str, str]) -> None:
        self.recording = recording
        self.rules = recording.document["configs"]
        self.lines: list[str] = []
        self.up: dict | None = None
        self.down: dict | None = None
        ignored = self.rules.get("ignored_with")
        if ignored and recording.arguments.get(ignored):
            self.lines = [self.rules["ignored_line"]]
            return
        if recording.facts.get("runner_reads_no_file"):
            return
        shipped = Path(self.rules["shipped"])
        root = environ.get(self.rules["variable"])
        self._look(Path(root) if root else shipped)

    def _look(self, root: Path) -> None:
        device = self.recording.facts["device"].replace(" ", "_")
        name = self.rules["name"].replace("{device}", device)
        folder = root / self.rules["folder"]
        if self.rules["listed"] and not (folder / name).is_file():
            self._list(folder.parent)
        self.up, line = self._read(root, folder / name, "found", "default")
        self.lines.append(line)
        if not self.rules["down"]:
            return
        down = folder / name.replace(".json", "_down.json")
        if (found := self._read(root, down, "found", "default"))[0] is not None:
            self.down = found[0]
            self.lines.append(found[1])
        else:
            self.lines.append(self._missing_down(down, found[1]))

    def _missing_down(self, path: Path, default: str) -> str:
        """What is printed for the down file depends on whether there is an up file, in some releases."""
        line = self.rules["lines"].get("down_missing")
        if line is None or (self.rules["down"] == "reuses" and self.up is None):
            return default
        return line.replace("{path}", str(path))

    def _list(self, folder: Path) -> None:
        """SGLang 0.5.12 and later list the directory when the exact file is missing, and die without it."""
        try:
            next(folder.iterdir(), None)
        except OSError:
            if self.rules["variable"] not in os.environ:
                return  # the shipped directory, which is not here
            raise RefusedError(
                [
                    "Traceback (most recent call last):",
                    f"FileNotFoundError: [Errno 2] No such file or directory: '{folder}'",
                ]
            ) from None

    def _read(self, root: Path, path: Path, found: str, missing: str) -> tuple[dict | None, str]:
        lines = self.rules["lines"]
        try:
            table = json.loads(path.read_text())
        except OSError:
            other = self._other_triton(root, path.name)
            if other is None:
                return None, lines[missing].replace("{path}", str(path))
            version = other.parent.name.removeprefix("triton_").replace("_", ".")
            line = lines["stale"].replace("{path}", str(path)).replace("{version}", version)
            return json.loads(other.read_text()), line.replace("{found}", str(other))
        except ValueError as error:
            raise RefusedError(
                ["Traceback (most recent call last):", f"json.decoder.JSONDecodeError: {error}"]
            ) from None
        return table, lines[found].replace("{path}", str(path))

    def _other_triton(self, root: Path, name: str) -> Path | None:
        for version in self.rules.get("fallbacks", ()):
            path = root / "configs" / version / name
            if path.is_file() and version != Path(self.rules["folder"]).name:
                return path
        return None

    def factor(self, tokens: int) -> float:
        """Time of the MoE kernels against the default's: up and down weigh alike."""
        if self.up is None:
            return 1.0
        down = self.down if self.down is not None else self.up
        return (self._kernel(self.up, tokens) + self._kernel(down, tokens)) / 2

    def _kernel(self, table: dict, tokens: int) -> float:
        """By the tile of the entry that the server would pick: the nearest key."""
        keys = [int(key) for key in table if key.isdigit()]
        if not keys:
            return 1.0
        entry = table[str(min(keys, key=lambda key: abs(key - tokens)))]
        factor = 1.0
        phase = "decode" if tokens <= _LARGEST_DECODE else "prefill"
        for size, times in self.recording.document["tiles"][phase].items():
            factor *= times.get(str(entry.get(size)), 1.0)
        return factor


# --- what is printed -----------------------------------------------------------------------------------


class Log:
    """Prints lines with the time of the evening on which this start was recorded."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._now = FIRST_EVENING + timedelta(minutes=10 * recording.start)

    def say(self, template: str, **values: object) -> None:
        """Print a line; names in braces stand for facts."""
        self._now += timedelta(milliseconds=700)
        facts = {**self._recording.facts, **values}
        facts["kv_commas"] = f"{facts['kv_tokens']:,}"
        facts["time"] = self._now.strftime(self._recording.document["time"])
        print(_filled(template, facts), flush=True)  # noqa: T201

    def start(self, configs: Configs) -> None:
        """All lines up to the one that says that it is ready."""
        recording, document = self._recording, self._recording.document
        self.say(
            "recorded server: {what}; no token is computed, its times are planted",
            what=f"{document['server']} {document['version']}",
        )
        for entry in document["start"]:
            moment = entry.get("moment", "")
            if entry.get("if") and not recording.facts.get(entry["if"]):
                continue
            if entry.get("unless") and recording.facts.get(entry["unless"]):
                continue
            if moment == "configs":
                for line in configs.lines:
                    self.say(document["worker"] + line)
            for line in recording.extra.get(moment, ()):
                self.say(document["worker"] + line)
            if "line" in entry:
                self.say(entry["line"], arguments=printed(recording), given=repr(recording.named))


def printed(recording: Recording) -> str:
    """The resolved arguments in the style of the release."""
    style = recording.document["style"]
    if style == "dict":
        return "{" + ", ".join(f"{name!r}: {value!r}" for name, value in recording.arguments.items()) + "}"
    return ", ".join(f"{name}={value!r}" for name, value in recording.arguments.items())


def hostile_lines() -> list[str]:
    """Lines that attack whoever reads the log."""
    return [
        "\x1b]0;owned\x07\x1b[2J\x1b[31mUsing MoE kernel config from \x1b[0m\x9b2J",
        "[bold red]markup[/] <script>alert(1)</script> \u202egnp.exe",
        "server_args={'model_path': '\x1b[2Jevil\x1b[0m', 'tp_size': " + "[" * 5000,
        "x" * (2 << 20),
        "Capture cuda graph bs [" + "1, " * 100_000 + "1]",
    ]


# --- how fast it is ------------------------------------------------------------------------------------


class Times:
    """The times of a pass: one closed form, with noise by seed."""

    def __init__(self, recording: Recording, configs: Configs) -> None:
        self._recording = recording
        self._configs = configs
        self._passes = 0

    def of_pass(self, requests: int, concurrency: int, inputs: int, outputs: int) -> dict:
        """What a load generator would have measured."""
        recording, times = self._recording, self._recording.document["times"]
        self._passes += 1
        running = min(concurrency, recording.facts["max_running_requests"])
        noise = math.exp(recording.random.gauss(0, recording.document["noise"]["between_passes"]))
        # The first pass of a start still compiles and fills caches: that is why it is discarded.
        cold = times["first_pass"] if self._passes == 1 else 1.0
        slow = noise * cold / recording.speed

        decode = self._configs.factor(running)
        step_ms = times["other_ms"] + times["moe_ms"] * decode + times["each_request_ms"] * running
        prefill = self._configs.factor(recording.facts["prefill_chunk"])
        if not recording.facts.get("prefill_graphs"):
            prefill *= times["without_prefill_graphs"]
        itl_ms = step_ms * recording.scale["itl"] * slow
        ttft_ms = (times["prefill_ms"] + times["prefill_us_per_token"] * inputs / 1000 * prefill) * slow
        ttft_ms *= recording.scale["ttft"]
        each_s = (ttft_ms + itl_ms * (outputs - 1)) / 1000
        duration_s = requests / running * each_s
        # Who waits for a place waits, on average, for half of what is before.
        queue_ms = max(0, concurrency - running) / running * each_s * 1000
        completed = requests
        tail = 1.6 + 0.1 * recording.random.random()
        return {
            "requested": requests,
            "completed": completed,
            "duration_s": duration_s,
            "input_tokens": requests * inputs,
            "output_tokens": requests * outputs,
            "output_tokens_per_s": requests * outputs / duration_s,
            "requests_per_s": requests / duration_s,
            "ttft_ms": {
                "mean": (ttft_ms + queue_ms) * 1.04,
                "p50": ttft_ms + queue_ms,
                "p99": (ttft_ms + queue_ms) * tail,
            },
            "itl_ms": {"mean": itl_ms * 1.02, "p50": itl_ms, "p99": itl_ms * tail},
            "running": running,
        }


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

    def one_pass(self, wanted: dict) -> tuple[int, dict]:
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
