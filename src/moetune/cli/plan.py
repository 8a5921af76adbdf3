"""`moetune plan`: what will run, what it looks for, what tuning would gain; nothing is written."""

from __future__ import annotations

from typing import Any

import click

from moetune.applications.request import Request
from moetune.cli.options import OUTPUT, REQUEST, exit_code, request_from, sink_from, with_options

_EPILOG = """\b
Examples:
  moetune plan Qwen/Qwen3.5-122B-A10B --tp 4 --gpu "NVIDIA H200"
  moetune plan ./checkpoint/config.json --server vllm --server-version 0.20.0 --gpu "NVIDIA L40S"
  moetune plan Qwen/Qwen3.5-122B-A10B --tp 4 --gpu "NVIDIA H200" --server-log server.log
  moetune plan --experts 256 --topk 8 --hidden 3072 --intermediate 1024 --gpu "NVIDIA H200" --json

\b
Exit codes: 0 there is something to gain; 1 not on any of the GPUs, or less than noise;
2 it could not be found out."""


@click.command(epilog=_EPILOG)
@with_options(
    *REQUEST,
    click.option(
        "--trace",
        metavar="FILE",
        multiple=True,
        help="A torch-profiler trace of a rank on that GPU: what tuning can give at most; repeatable.",
    ),
    click.option(
        "--server-log",
        metavar="FILE",
        multiple=True,
        help="A log of the server under load: the same, estimated for decoding; repeatable.",
    ),
    *OUTPUT,
)
def plan(**values: Any) -> int:  # noqa: ANN401 - click's values
    """Say which MoE runner the server uses, the files it looks for and in which order, what is there
    already, and what tuned files are predicted to gain; with a trace or a log of the server also what
    serving can gain at most. Nothing is written.

    MODEL is a config.json or its folder, a Hugging Face id, or the name of a packaged checkpoint; it
    can be left out when --experts, --topk, --hidden and --intermediate are given.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    exit_zero = values.pop("exit_zero")
    traces, logs = values.pop("trace"), values.pop("server_log")
    request = request_from(values, Request)
    from moetune.applications.planning import make_plan
    from moetune.cli.report import show_plan

    answer = make_plan(request)
    show_plan(sink, answer)
    if not traces and not logs:
        sink.document(answer.to_json())
        return exit_code(answer.gains, exit_zero)

    from moetune.applications.at_most import bounds
    from moetune.cli.bounds import show_bound

    found = bounds(answer, traces, logs)
    for bound in found:
        show_bound(sink, bound)
    sink.document({**answer.to_json(), "at_most": [bound.to_json() for bound in found]})
    return exit_code(answer.gains and any(bound.worth for bound in found), exit_zero)
