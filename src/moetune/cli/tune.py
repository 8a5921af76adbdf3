"""`moetune tune`: find configs and write the server's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from moetune.applications.request import DEFAULT_OUT, TuneRequest
from moetune.cli.install import PLACE, STATE, check_can_ask, run_install
from moetune.cli.measuring import (
    EFFORT,
    MEASURE,
    PREDICT,
    chosen_effort,
    measure_and_show,
    measured_exit_code,
    take_measure,
)
from moetune.cli.options import OUTPUT, REQUEST, exit_code, request_from, sink_from, with_options
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from moetune.applications.measured_answer import MeasuredTuning
    from moetune.applications.tuning import Tuned
    from moetune.cli.output import Sink

_EPILOG = """\b
Examples:
  moetune tune Qwen/Qwen3.5-122B-A10B --tp 4 --gpu "NVIDIA H200" --out configs
  moetune tune Qwen/Qwen3-30B-A3B --server vllm --gpu "NVIDIA L40S" --gpu "NVIDIA A100-SXM4-80GB"
  moetune tune Qwen/Qwen3-30B-A3B --server vllm --gpu "NVIDIA L40S" --install --root image

\b
Exit codes: 0 files are there; 1 nothing to gain on any of the GPUs, and nothing was written;
2 something could not run; 130 interrupted. --exit-zero turns 1 into 0 for image builds."""

_TUNE = (
    EFFORT,
    *MEASURE,
    click.option("--out", metavar="DIR", default=DEFAULT_OUT, show_default=True, help="Where they go."),
    click.option("--force", is_flag=True, help="Replace files of another problem or another origin."),
    click.option(
        "--start-from",
        metavar="FILE",
        multiple=True,
        help="Config files whose entries are candidates too; repeatable.",
    ),
    click.option(
        "--compile/--no-compile",
        "compile_configs",
        default=True,
        show_default=True,
        help="Compile what was chosen before it is written, where Triton is installed.",
    ),
    click.option("--install", is_flag=True, help="Then install what was written, as `moetune install` does."),
    *PLACE,
    STATE,
)


@click.command(epilog=_EPILOG)
@with_options(*REQUEST, *_TUNE, *OUTPUT)
def tune(effort: str | None, install: bool, yes: bool, **values: Any) -> int:  # noqa: ANN401 - click's values
    """Find configs for the fused-MoE Triton kernel and write the files that the server reads, with
    their provenance beside them.

    MODEL is a config.json or its folder, a Hugging Face id, or the name of a packaged checkpoint; it
    can be left out when --experts, --topk, --hidden and --intermediate are given.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    exit_zero = values.pop("exit_zero")
    place = {name: values.pop(name) for name in ("root", "copy_shipped", "state")}
    measure = take_measure(values)
    effort = chosen_effort(effort, values["gpu"], measure)
    if install:
        check_can_ask("tune ... --install", yes=yes, root=place["root"])
    elif place["root"] or place["copy_shipped"] or (place["state"] and effort == PREDICT):
        raise InputError("--root, --copy-shipped and --state say how to install", "add --install")
    if effort != PREDICT:
        measured = measure_and_show(sink, effort, {**measure, "state": place["state"]}, values)
        document = measured.to_json()
        if install and measured.files:
            document["installed"] = _install(sink, measured, place, yes)
        sink.document(document)
        return measured_exit_code(measured, exit_zero)
    request = request_from(values, TuneRequest)
    from moetune.applications.tuning import tune_request
    from moetune.cli.report import show_plan

    tuned = tune_request(request)
    show_plan(sink, tuned.plan)
    _show_files(sink, tuned)
    document = tuned.to_json()
    if install and tuned.files:
        document["installed"] = _install(sink, tuned, place, yes)
    sink.document(document)
    return exit_code(tuned.plan.gains, exit_zero)


def _install(sink: Sink, tuned: Tuned | MeasuredTuning, place: dict[str, Any], yes: bool) -> dict[str, Any]:
    """Install exactly what was written, for the server that it was written for."""
    from moetune.applications.install_plan import InstallRequest

    server = tuned.plan.server
    request = InstallRequest(
        paths=tuple(file.path for file in tuned.files),
        server=server.name,
        server_version=server.version,
        triton_version=server.triton_version,
        **place,
    )
    sink.line()
    return run_install(sink, request, yes=yes).to_json()


def _show_files(sink: Sink, tuned: Tuned) -> None:
    from moetune.cli.report import show_use, show_written

    sink.line()
    if not tuned.files:
        sink.heading("nothing was written")
        return
    show_written(sink, tuned.files, "predicted")
    sink.fields(("compiled", f"{report.gpu}: {report.text}") for report in tuned.compiled)
    for report in tuned.compiled:
        for replaced in report.replaced:
            sink.note(f"did not compile for {report.gpu}: {replaced}")
    show_use(sink, tuned)
    sink.fields([("measure", f"{tuned.measure_command}  # on a machine with that GPU")])
