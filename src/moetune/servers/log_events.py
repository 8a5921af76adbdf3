"""What a server's log says, independent of its words: the grammars make these, doctor reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from moetune.domain.problem import Kernel

ServerName = Literal["sglang", "vllm"]


@dataclass(frozen=True, slots=True)
class ConfigName:
    """A config file as a log names it.

    Attributes:
        file: the bare name.
        directory: what stands before it, without the slash.
        dtype: tag of the name, empty without one.
        triton: version that the directory is for (`3.6.0`), empty where directories have none.
    """

    file: str
    directory: str
    E: int
    N: int
    device: str
    dtype: str = ""
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    kernel: Kernel = "up"
    triton: str = ""

    @property
    def shape(self) -> tuple[int, int, str]:
        """E, N and the dtype tag."""
        return self.E, self.N, self.dtype


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a line says; `server` is None where both print it."""

    server: ServerName | None


@dataclass(frozen=True, slots=True)
class ConfigFound(Event):
    """A tuned file is read."""

    name: ConfigName


@dataclass(frozen=True, slots=True)
class ConfigStale(Event):
    """A file of another Triton version is read, for the wanted one is missing."""

    wanted: ConfigName
    found: ConfigName


@dataclass(frozen=True, slots=True)
class ConfigMissing(Event):
    """No file was found.

    Attributes:
        names: in the order of the places that were tried.
        reused_up: the down kernel runs with the up file; otherwise with the default.
        down_only: the line speaks of the down file, and says nothing of the up file.
    """

    names: tuple[ConfigName, ...]
    reused_up: bool = False
    down_only: bool = False


@dataclass(frozen=True, slots=True)
class DenseConfigMissing(Event):
    """The dense block-wise GEMM, another kernel, has no file."""

    file: str


@dataclass(frozen=True, slots=True)
class FilesIgnored(Event):
    """Deterministic or batch-invariant mode: no file is opened."""

    mode: str


@dataclass(frozen=True, slots=True)
class PairOverridden(Event):
    """The down kernel's BLOCK_SIZE_M follows the up kernel's."""

    down: int
    up: int
    m: int


@dataclass(frozen=True, slots=True)
class TmaEnabled(Event):
    """USE_TMA is on in the file of a kernel."""

    kernel: Kernel


@dataclass(frozen=True, slots=True)
class RunnerChosen(Event):
    """Which MoE runner a server says that it uses.

    Attributes:
        runner: in the server's words.
        reads_file: whether it is the Triton kernel that reads tuned files.
        dtypes: tags of the file names that this choice is about; empty: of all.
        text: the line's own words.
    """

    runner: str
    reads_file: bool
    dtypes: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Arguments(Event):
    """A start of the server with these resolved arguments: name to value as printed, unquoted."""

    values: tuple[tuple[str, str], ...]
    starts: bool = True


@dataclass(frozen=True, slots=True)
class Release(Event):
    """The release says its own number, or prints a line that only some releases print.

    Attributes:
        exact: the number itself.
        since: oldest release that prints such a line.
        until: newest one that does.
    """

    exact: str = ""
    since: tuple[int, ...] = ()
    until: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture(Event):
    """Class name of the model."""

    name: str


@dataclass(frozen=True, slots=True)
class Limit(Event):
    """A resolved number: `kv_tokens`, `max_running_requests`, `prefill_chunk`, `context_length`."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class GraphSizes(Event):
    """Sizes for which graphs are captured.

    Attributes:
        phase: `decode` or `prefill`.
        sizes: batch sizes or numbers of tokens.
        tokens_per_request: tokens of a request in one decode step.
        backend: of the capture, empty when it is not said.
    """

    phase: str
    sizes: tuple[int, ...]
    tokens_per_request: int = 1
    backend: str = ""


@dataclass(frozen=True, slots=True)
class GraphsOff(Event):
    """Graphs are switched off, or down to less.

    Attributes:
        phase: `decode` or `prefill`.
        reason: in the server's words.
    """

    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class AllReduceFusion(Event):
    """All-reduce fused with the norm: `on`, `asked`, `refused` or `off`."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class OutOfResources(Event):
    """Triton found that a launch does not fit.

    Attributes:
        resource: `shared memory`, `threads`, `registers`, `tensor memory`.
        required: of it.
        limit: of the hardware.
    """

    resource: str
    required: int
    limit: int


@dataclass(frozen=True, slots=True)
class Frame(Event):
    """A frame of a traceback inside the fused-MoE code: of its `loader` or its `kernel`."""

    part: str
    function: str


@dataclass(frozen=True, slots=True)
class Raised(Event):
    """The last line of a traceback: type and message."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """The server takes requests."""


@dataclass(frozen=True, slots=True)
class Seen(Event):
    """A line that only this server prints."""


Build = Callable[[re.Match[str]], Iterator[Event]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of line.

    Attributes:
        literal: stands in every such line; asked first, for it is cheap.
        pattern: the line, in linear time.
        build: its events.
    """

    literal: str
    pattern: re.Pattern[str]
    build: Build


class LogGrammar(Protocol):
    """The log lines of a server, in all its releases."""

    needles: tuple[bytes, ...]
    """Every line that says something holds one of these, also escaped in JSON."""
    openers: tuple[str, ...]
    """A line with one of these and no event is probably a piece of a wrapped line."""

    def read(self, text: str) -> tuple[Event, ...]:
        """What a line says; nothing for most."""
        ...


def apply_rules(rules: tuple[Rule, ...], text: str) -> tuple[Event, ...]:
    """The events of all rules that a line satisfies."""
    events: list[Event] = []
    for rule in rules:
        if rule.literal in text and (match := rule.pattern.search(text)) is not None:
            events.extend(rule.build(match))
    return tuple(events)


def values_of(text: str, patterns: Mapping[str, re.Pattern[str]]) -> tuple[tuple[str, str], ...]:
    """Arguments in a printed dictionary, dataclass or config: name to value without quotes."""
    found = []
    for name, pattern in patterns.items():
        match = pattern.search(text)
        if match is not None:
            value = match[1]
            found.append((name, value[1:-1] if value[:1] in "'\"" else value))
    return tuple(found)


def argument_patterns(names: tuple[str, ...]) -> dict[str, re.Pattern[str]]:
    """Expressions for `name=value` and `'name': value`."""
    value = r"('[^'\n]{0,1024}'|\"[^\"\n]{0,1024}\"|\[[\d, ]{0,8192}\]|[\w.+-]{1,128})"
    return {name: re.compile(rf"(?<![\w'\"-])['\"]?{name}['\"]?(?:=|: ?){value}") for name in names}


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers of a printed list."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", text)[:4096])
