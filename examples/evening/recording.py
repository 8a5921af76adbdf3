"""What a recording is, with the effects of one start's command line, variables and config files."""

from __future__ import annotations

import json
import math
import random
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

_LARGEST_DECODE = 512
FIRST_EVENING = datetime(2026, 1, 1, 20, 0, 0)
Json = dict[str, Any]


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
        self, document: Json, argv: list[str], environ: dict[str, str], start: int, seed: int
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

    def apply(self, effect: Json) -> None:
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
        page = int(self.document.get("page", 16))
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


def filled(template: str, facts: Json) -> str:
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
        self.rules: Json = recording.document["configs"]
        self.named = self.rules["variable"] in environ
        self.lines: list[str] = []
        self.up: Json | None = None
        self.down: Json | None = None
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
        line: str | None = self.rules["lines"].get("down_missing")
        if line is None or (self.rules["down"] == "reuses" and self.up is None):
            return default
        return line.replace("{path}", str(path))

    def _list(self, folder: Path) -> None:
        """SGLang 0.5.12 and later list the directory when the exact file is missing, and die without it."""
        try:
            next(folder.iterdir(), None)
        except OSError:
            if not self.named:
                return  # the shipped directory, which is not here
            raise RefusedError(
                [
                    "Traceback (most recent call last):",
                    f"FileNotFoundError: [Errno 2] No such file or directory: '{folder}'",
                ]
            ) from None

    def _read(self, root: Path, path: Path, found: str, missing: str) -> tuple[Json | None, str]:
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
            path = root / "configs" / str(version) / name
            if path.is_file() and version != Path(self.rules["folder"]).name:
                return path
        return None

    def factor(self, tokens: int) -> float:
        """Time of the MoE kernels against the default's: up and down weigh alike."""
        if self.up is None:
            return 1.0
        down = self.down if self.down is not None else self.up
        return (self._kernel(self.up, tokens) + self._kernel(down, tokens)) / 2

    def _kernel(self, table: Json, tokens: int) -> float:
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
        print(filled(template, facts), flush=True)  # noqa: T201

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


# --- how fast it is ------------------------------------------------------------------------------------


class Times:
    """The times of a pass: one closed form, with noise by seed."""

    def __init__(self, recording: Recording, configs: Configs) -> None:
        self._recording = recording
        self._configs = configs
        self._passes = 0

    def of_pass(self, requests: int, concurrency: int, inputs: int, outputs: int) -> Json:
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
