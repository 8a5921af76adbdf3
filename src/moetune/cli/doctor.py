"""`moetune doctor`: what a server's log says is wrong, and the command that mends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moetune.cli.options import OUTPUT, sink_from, with_options
from moetune.cli.output import Prose
from moetune.domain.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.applications.doctor import Diagnosis, ServerDiagnosis
    from moetune.cli.output import Sink
    from moetune.domain.findings import Finding

_EPILOG = """\b
Examples:
  moetune doctor server.log
  kubectl logs --prefix deploy/sglang | moetune doctor -
  moetune doctor worker-*.log.gz --model Qwen/Qwen3-30B-A3B --json
  moetune doctor              # this machine, for a bug report

\b
Exit codes: 0 nothing found at or above --fail-on; 1 something was; 2 a log could not be read.
`moetune explain CODE` tells the story of a code."""

_LEVELS = {
    "crash": Severity.CRASH,
    "cannot-run": Severity.CANNOT_RUN,
    "wrong-numbers": Severity.WRONG_NUMBERS,
    "never-read": Severity.NEVER_READ,
    "costs-speed": Severity.COSTS_SPEED,
    "info": Severity.INFO,
}
_MAX_SIZES = 24


@click.command(epilog=_EPILOG)
@click.argument("logs", nargs=-1, metavar="[LOG]...")
@click.option("--model", metavar="MODEL", help="The model, where the log does not name it or names a path.")
@click.option("--gpu", metavar="NAME", help="The GPU. [default: as the file names of the log say]")
@click.option("--compute-capability", metavar="X.Y", help="For a GPU that moetune does not know.")
@click.option("--server-version", metavar="X.Y.Z", help="Its release. [default: what the log shows]")
@click.option(
    "--config",
    "configs",
    metavar="FILE",
    multiple=True,
    help="A config file that the server read: names the entry that a crash is about; repeatable.",
)
@click.option(
    "--fail-on",
    type=click.Choice([*_LEVELS, "nothing"]),
    default="costs-speed",
    show_default=True,
    help="Exit with 1 for findings at least this bad.",
)
@click.option("--offline", is_flag=True, help="Never ask the network about the model.")
@with_options(*OUTPUT)
def doctor(
    logs: tuple[str, ...],
    fail_on: str,
    **values: Any,  # noqa: ANN401 - click's values
) -> int:
    """Read LOGs of SGLang or vLLM (files, .gz, - for standard input) and say what is wrong, worst first,
    with the command that mends it. Without a LOG: this machine, fit to paste into a bug report.
    """  # noqa: D205 - one sentence is the help text
    exit_zero = values.pop("exit_zero")
    sink = sink_from(values)
    if not logs:
        return _machine(sink)
    from moetune.applications.doctor_request import DoctorRequest, diagnose_request

    diagnosis = diagnose_request(DoctorRequest(logs, **values))
    _show(sink, diagnosis)
    sink.document(diagnosis.to_json())
    bad = fail_on != "nothing" and diagnosis.worse_or_equal(_LEVELS[fail_on])
    return 1 if bad and not exit_zero else 0


def _machine(sink: Sink) -> int:
    from moetune.applications.doctor_machine import inspect_machine

    machine = inspect_machine()
    sink.heading("this machine")
    sink.fields(machine.fields())
    sink.line()
    sink.line("Paste this into a bug report; tokens and keys are redacted. To read a log:")
    sink.line("  moetune doctor server.log")
    sink.document(machine.to_json())
    return 0


def _show(sink: Sink, diagnosis: Diagnosis) -> None:
    for server in diagnosis.servers:
        sink.heading(f"{server.server} {server.version_text}")
        sink.fields(_server_fields(server))
        sink.line()
    if not diagnosis.findings:
        lines = sum(lines for _, lines, _ in diagnosis.logs)
        sink.line(f"nothing found in {lines} lines")
    for finding in diagnosis.findings:
        _show_finding(sink, finding)


def _server_fields(server: ServerDiagnosis) -> Iterator[tuple[str, str]]:
    yield "Triton", server.triton_version
    if not server.version_exact:
        yield "assumed", f"--server-version {server.version}, for the log leaves it open"
    yield "GPU", ", ".join(server.gpus)
    yield "model", server.model + (f" ({server.architecture})" if server.architecture else "")
    yield "split", ", ".join(f"{name} {size}" for name, size in server.parallelism)
    yield "MoE runner", Prose(server.runner)
    for lookup in server.lookups:
        yield "reads", f"{lookup.kernel}: {lookup.path}" if lookup.path else ""
    yield "KV tokens", "" if server.kv_tokens is None else f"{server.kv_tokens:,}"
    yield "requests", "" if server.max_running_requests is None else f"{server.max_running_requests} at once"
    yield "chunk", "" if server.prefill_chunk is None else str(server.prefill_chunk)
    yield "decode at", Prose(_sizes(server.graphs.decode_tokens))
    yield "prefill at", Prose(_sizes(server.graphs.prefill_tokens))
    for phase, reason in server.graphs.off:
        yield "graphs off", Prose(f"{phase}: {reason}")
    for state, reason in server.all_reduce_fusion:
        yield "AR fusion", Prose(f"{state}: {reason}")


def _sizes(sizes: tuple[int, ...]) -> str:
    if len(sizes) <= _MAX_SIZES:
        return ", ".join(map(str, sizes))
    head = ", ".join(map(str, sizes[: _MAX_SIZES // 2]))
    tail = ", ".join(map(str, sizes[-_MAX_SIZES // 4 :]))
    return f"{head}, ... {tail} ({len(sizes)} in all)"


def _show_finding(sink: Sink, finding: Finding) -> None:
    sink.heading(f"{finding.code.code} {finding.code.severity.value}: {finding.code.title}")
    sink.fields(
        [
            ("what", Prose(finding.message)),
            ("where", finding.where),
            *finding.facts,
            ("cost", Prose(finding.cost)),
        ]
    )
    for command in filter(None, finding.mend.split("\n")):
        sink.line()
        sink.line(f"  {command}")
    sink.line()
