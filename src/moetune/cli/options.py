"""The options that verbs share, and the request that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from moetune.applications.request import DEFAULT_MAX_M, Request
from moetune.cli.output import Sink
from moetune.domain.errors import InputError
from moetune.domain.text import printable

AnyRequest = TypeVar("AnyRequest", bound=Request)
_Function = TypeVar("_Function", bound=Callable[..., object])


REQUEST = (
    click.argument("model", required=False, metavar="MODEL"),
    # how the server is split
    click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel size."),
    click.option(
        "--ep",
        type=int,
        default=1,
        show_default=True,
        help="Expert-parallel size; for vLLM more than 1 means --enable-expert-parallel.",
    ),
    click.option("--dp", type=int, default=1, show_default=True, help="Data-parallel size."),
    click.option(
        "--redundant-experts", type=int, default=0, show_default=True, help="Experts held twice (EPLB)."
    ),
    # what the checkpoint says, by hand
    click.option(
        "--quant",
        metavar="NAME",
        help="Quantization of the experts: fp8-block, int4[32], awq, ...; a wrong name lists them.",
    ),
    click.option("--experts", type=int, help="Routed experts of a layer."),
    click.option("--topk", type=int, help="Experts a token goes to."),
    click.option("--hidden", type=int, help="Hidden size."),
    click.option("--intermediate", type=int, help="Columns between up and down of one expert."),
    click.option("--latent", type=int, help="Columns that enter the experts after a latent projection."),
    click.option("--shared-experts", type=int, help="Experts that every token goes to."),
    click.option("--gated/--no-gated", default=None, help="Whether the up kernel writes gate and up."),
    # the server
    click.option("--server", metavar="NAME", help="sglang or vllm. [default: the installed, else sglang]"),
    click.option(
        "--server-version", metavar="X.Y.Z", help="Its release. [default: the installed, else the newest]"
    ),
    click.option(
        "--triton-version", metavar="X.Y.Z", help="Its Triton. [default: the installed, else what it pins]"
    ),
    click.option("--runner-backend", default="auto", help="Its --moe-runner-backend, --moe-backend."),
    click.option("--a2a-backend", default="none", help="Its --moe-a2a-backend, --all2all-backend."),
    click.option("--server-quantization", metavar="NAME", help="Its --quantization."),
    click.option("--deterministic", is_flag=True, help="Deterministic or batch-invariant inference is on."),
    click.option("--disable-shared-experts-fusion", is_flag=True, help="SGLang's flag of that name."),
    click.option("--lora", is_flag=True, help="LoRA is on."),
    click.option(
        "--enable-fused-moe-sum-all-reduce",
        is_flag=True,
        help="SGLang's flag of that name: the down kernel sums over topk.",
    ),
    click.option(
        "--server-env", metavar="NAME=VALUE", multiple=True, help="A variable of the server; repeatable."
    ),
    click.option(
        "--flashinfer/--no-flashinfer", default=None, help="Whether flashinfer is there. [default: as pinned]"
    ),
    click.option("--assume-triton", is_flag=True, help="Go on although another runner, or none, is known."),
    # the GPU
    click.option(
        "--gpu", metavar="NAME", multiple=True, help="A GPU's name; repeatable. [default: this machine's]"
    ),
    click.option("--compute-capability", metavar="X.Y", help="For a GPU that moetune does not know."),
    # the keys
    click.option("--m", metavar="M[:WEIGHT],...", help="Your own keys, weighted by traffic: 1,64:3,8192."),
    click.option(
        "--max-m",
        type=int,
        default=DEFAULT_MAX_M,
        show_default=True,
        help="Largest m that the server meets: its prefill chunk.",
    ),
    click.option("--offline", is_flag=True, help="Never ask the network."),
)

OUTPUT = (
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout."),
    click.option("--exit-zero", is_flag=True, help="Exit with 0 where the answer is no (1)."),
    click.option("--no-color", is_flag=True, help="No colours; NO_COLOR says the same."),
)


def with_options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Give a verb the options, shown by `--help` in the order in which they stand here."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def request_from(values: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """The request that the options make."""
    fields = dict(values)
    fields["server_environment"] = dict(_assignment(text) for text in fields.pop("server_env"))
    fields["m"] = fields["m"] or ()
    return kind(**fields)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--server-env {printable(text, 40)} is not NAME=VALUE")
    return name, value


def sink_from(values: dict[str, Any]) -> Sink:
    """Take `--json` and `--no-color` out of the values."""
    return Sink(values.pop("as_json"), color=False if values.pop("no_color") else None)


def exit_code(gains: bool, exit_zero: bool) -> int:
    """0: something is gained; 1: the answer is no for all that was asked."""
    return 0 if gains or exit_zero else 1
