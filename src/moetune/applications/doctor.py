"""`moetune doctor`: logs of servers to what ran, what is wrong with it and the command that mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetune import __version__
from moetune.applications.doctor_commands import batches_of
from moetune.applications.doctor_facts import ALL_NEEDLES, LogReader
from moetune.applications.doctor_findings import Judge, log_findings, worst_first
from moetune.applications.doctor_reader import HitReader
from moetune.applications.doctor_resources import explains
from moetune.applications.doctor_solve import Known, gpu_of, guess_model, guess_version, running_triton
from moetune.domain.codec import to_json
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.text import printable
from moetune.servers.registry import open_server

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import IO

    from moetune.applications.doctor_reader import LogSource
    from moetune.applications.doctor_records import LogFacts, ServerFacts, Shape
    from moetune.domain.findings import Finding, Severity

SCHEMA = "moetune.doctor/1"
NO_KNOWLEDGE = Known()

_RUNNER_OF_LOOKUP = "the Triton fused-MoE kernel (the log shows its lookup)"


@dataclass(frozen=True, slots=True)
class Graphs:
    """What graphs are captured for.

    Attributes:
        decode_tokens: decode batches, in tokens.
        prefill_tokens: prefill lengths.
        off: phase to what switched graphs off, in the server's words.
    """

    decode_tokens: tuple[int, ...] = ()
    prefill_tokens: tuple[int, ...] = ()
    off: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LookedUp:
    """One file that the server looked for: what an experiment asks to prove that a file was read.

    Attributes:
        kernel: `up` or `down`.
        file: the bare name.
        outcome: `found`, `stale`, `missing`, or `reused up`.
        path: what was read; empty when nothing was.
        where: file and line of the log.
        ranks: that said so, sorted; empty where ranks are not named.
    """

    kernel: str
    file: str
    outcome: str
    path: str
    where: str
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServerDiagnosis:
    """What the logs show of one server: the last start, where there are several.

    Attributes:
        server: `sglang` or `vllm`.
        version: for commands.
        version_text: how the release is known.
        version_exact: the log says the number, or the user did.
        triton_version: of its directories, else what a known release pins; empty when nothing tells.
        gpus: as its file names spell them.
        model: as it was started, empty when the log does not say.
        architecture: class name of the model.
        parallelism: size to value, as the arguments say it.
        runner: which MoE runner computes the experts, in words; empty when nothing tells.
        arguments: resolved arguments that matter here.
        kv_tokens: tokens that fit into the KV cache.
        max_running_requests: likewise.
        prefill_chunk: tokens of one prefill step.
        all_reduce_fusion: `asked`, `on`, `refused`, `off` to the server's words.
        keys: the keys that `--m` is given.
        lookups: the files that were looked for, in the order of the log.
        ready: the server said that it takes requests.
    """

    server: str
    version: str
    version_text: str
    version_exact: bool
    triton_version: str
    gpus: tuple[str, ...]
    model: str
    architecture: str
    parallelism: tuple[tuple[str, int], ...]
    runner: str
    arguments: tuple[tuple[str, str], ...]
    kv_tokens: int | None
    max_running_requests: int | None
    prefill_chunk: int | None
    graphs: Graphs
    all_reduce_fusion: tuple[tuple[str, str], ...]
    keys: tuple[int, ...]
    lookups: tuple[LookedUp, ...]
    ready: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer to `moetune doctor LOG`.

    Attributes:
        logs: name, lines and bytes of each.
        servers: in the order in which they appear.
        findings: worst first.
    """

    logs: tuple[tuple[str, int, int], ...]
    servers: tuple[ServerDiagnosis, ...]
    findings: tuple[Finding, ...]

    def worse_or_equal(self, severity: Severity) -> bool:
        """Whether a finding is at or above a severity."""
        return any(finding.code.severity.rank <= severity.rank for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The document of `moetune doctor LOG --json`."""
        return {
            "schema": SCHEMA,
            "moetune": __version__,
            "logs": [{"name": name, "lines": lines, "bytes": size} for name, lines, size in self.logs],
            "servers": [_server_json(server) for server in self.servers],
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """A finding as it stands in a document."""
    return {
        "code": finding.code.code,
        "title": finding.code.title,
        "severity": finding.code.severity.value,
        "message": finding.message,
        "where": finding.where,
        "facts": [{"name": name, "value": value} for name, value in finding.facts],
        "cost": finding.cost,
        "mend": finding.mend.split("\n") if finding.mend else [],
    }


def diagnose(
    logs: Sequence[str],
    known: Known = NO_KNOWLEDGE,
    *,
    config_files: Iterable[tuple[str, str]] = (),
    stream: IO[bytes] | None = None,
) -> Diagnosis:
    """Read logs and say what is wrong.

    Args:
        logs: paths; `-` is standard input. No path that a log names is opened.
        known: what a person says beside the logs.
        config_files: name and text of config files that the server read, for the entry that a crash is
            about.
        stream: read this in place of the only log.

    Raises:
        InputError: for what cannot be read, or holds no line of a server.
    """
    facts = read_logs(logs, stream)
    if not (facts.servers or facts.dense or facts.orphans or any(s.problems for s in facts.sources)):
        names = ", ".join(printable(source.name, 100) for source in facts.sources[:4])
        raise InputError(
            f"no line of {names} is one that SGLang or vLLM print when they start or look for a config",
            "give the log from the start of the server on: moetune doctor server.log",
        )
    files = tuple(config_files)
    findings = list(log_findings(facts))
    servers = []
    for server_facts in facts.servers.values():
        server, judge = _judge(server_facts, known, tuple(logs), files)
        servers.append(server)
        findings += list(judge.findings())
    sources = tuple((source.name, source.lines, source.size_bytes) for source in facts.sources)
    return Diagnosis(sources, tuple(servers), worst_first(findings))


def read_logs(logs: Sequence[str], stream: IO[bytes] | None = None) -> LogFacts:
    """What the logs say, before anything is concluded."""
    reader, hits = LogReader(), HitReader(ALL_NEEDLES)
    for name in logs:
        source: LogSource | None = None
        for source, hit in hits.read(name, stream):  # noqa: B007 - the last one counts
            if hit is not None:
                reader.take(hit)
        if source is not None:
            reader.next_log(source)
    return reader.finish()


def _judge(
    facts: ServerFacts, known: Known, logs: tuple[str, ...], files: tuple[tuple[str, str], ...]
) -> tuple[ServerDiagnosis, Judge]:
    version = guess_version(facts, known, lambda crash, server: explains(crash, server, facts, known))
    server = open_server(facts.name, version.version, running_triton(facts) or None)
    judge = Judge(facts, server, version, known, logs, files)
    start = facts.start
    batches = batches_of(facts)
    devices = dict.fromkeys(shape.name.device for shape in facts.shapes.values() if shape.name.device)
    gpus = tuple(gpu_of(device, known)[0].torch_name for device in devices)
    diagnosis = ServerDiagnosis(
        server=facts.name,
        version=version.version,
        version_text=version.text,
        version_exact=version.exact,
        triton_version=server.triton_version if version.exact or running_triton(facts) else "",
        gpus=tuple(dict.fromkeys(printable(gpu, 100) for gpu in gpus)),
        model=_model_name(facts, known),
        architecture=facts.architecture,
        parallelism=_parallelism(facts),
        runner=_runner(facts),
        arguments=tuple(
            sorted((name, printable(value, 1024)) for name, value in (start.values if start else {}).items())
        ),
        kv_tokens=facts.limits.get("kv_tokens", facts.limits.get("kv_allocated_tokens")),
        max_running_requests=facts.limits.get("max_running_requests")
        or (start.number("max_running_requests", "max_num_seqs") if start else None),
        prefill_chunk=batches.largest,
        graphs=Graphs(batches.decode, batches.prefill, tuple(sorted(facts.graphs_off.items()))),
        all_reduce_fusion=tuple(sorted(facts.fusion.items())),
        keys=batches.ms,
        lookups=tuple(_looked_up(shape) for shape in facts.shapes.values()),
        ready=facts.ready,
    )
    return diagnosis, judge


def _looked_up(shape: Shape) -> LookedUp:
    read = shape.name if shape.outcome == "found" else shape.found
    return LookedUp(
        kernel=shape.name.kernel,
        file=printable(shape.name.file, 300),
        outcome=shape.outcome,
        path=printable(f"{read.directory}/{read.file}", 1400) if read is not None else "",
        where=shape.where,
        ranks=tuple(sorted(printable(rank, 40) for rank in shape.ranks if rank)),
    )


def _model_name(facts: ServerFacts, known: Known) -> str:
    try:
        return printable(guess_model(facts.start, known).name, 300)
    except MoetuneError:
        if known.model is not None:
            raise
        return ""


_SIZES = (
    ("tp", ("tp_size", "tensor_parallel_size")),
    ("ep", ("ep_size", "ep_ranks")),
    ("dp", ("dp_size", "data_parallel_size")),
    ("pp", ("pp_size", "pipeline_parallel_size")),
)


def _parallelism(facts: ServerFacts) -> tuple[tuple[str, int], ...]:
    start = facts.start
    if start is None:
        return ()
    found = [(name, start.number(*arguments)) for name, arguments in _SIZES]
    return tuple((name, value) for name, value in found if value is not None)


def _runner(facts: ServerFacts) -> str:
    said = list(dict.fromkeys(printable(runner.runner, 60) for runner in facts.runners.values()))
    if said:
        return ", ".join(said)
    return _RUNNER_OF_LOOKUP if facts.shapes else ""


def _server_json(server: ServerDiagnosis) -> dict[str, Any]:
    return {
        "server": server.server,
        "version": server.version,
        "version_text": server.version_text,
        "version_exact": server.version_exact,
        "triton_version": server.triton_version,
        "gpus": list(server.gpus),
        "model": server.model,
        "architecture": server.architecture,
        "parallelism": dict(server.parallelism),
        "runner": server.runner,
        "arguments": dict(server.arguments),
        "kv_tokens": server.kv_tokens,
        "max_running_requests": server.max_running_requests,
        "prefill_chunk": server.prefill_chunk,
        "graphs": {
            "decode_tokens": list(server.graphs.decode_tokens),
            "prefill_tokens": list(server.graphs.prefill_tokens),
            "off": dict(server.graphs.off),
        },
        "all_reduce_fusion": dict(server.all_reduce_fusion),
        "keys": list(server.keys),
        "lookups": to_json(server.lookups),
        "ready": server.ready,
    }
