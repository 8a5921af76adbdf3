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
  moetune plan --experts 256 --topk 8 --hidden 3072 --intermediate 1024 --gpu "NVIDIA H200" --json

\b
Exit codes: 0 there is something to gain; 1 not on any of the GPUs; 2 it could not be found out."""


@click.command(epilog=_EPILOG)
@with_options(*REQUEST, *OUTPUT)
def plan(**values: Any) -> int:  # noqa: ANN401 - click's values
    """Say which MoE runner the server uses, the files it looks for and in which order, what is there
    already, and what tuned files are predicted to gain. Nothing is written.

    MODEL is a config.json or its folder, a Hugging Face id, or the name of a packaged checkpoint; it
    can be left out when --experts, --topk, --hidden and --intermediate are given.
    """  # noqa: D205 - one sentence is the help text
    sink = sink_from(values)
    exit_zero = values.pop("exit_zero")
    request = request_from(values, Request)
    from moetune.applications.planning import make_plan
    from moetune.cli.report import show_plan

    answer = make_plan(request)
    show_plan(sink, answer)
    sink.document(answer.to_json())
    return exit_code(answer.gains, exit_zero)
