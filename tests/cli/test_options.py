"""Every flag says something: each changes the request that the verb answers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import pytest

from moetune.applications.request import Request, TuneRequest
from moetune.cli.options import OUTPUT, exit_code, request_from
from moetune.cli.plan import plan
from moetune.cli.tune import tune
from moetune.domain.errors import InputError

# Flag with its value: the field that it sets, and to what.
FLAGS: dict[str, tuple[list[str], str, Any]] = {
    "model": (["org/name"], "model", "org/name"),
    "tp": (["--tp", "4"], "tp", 4),
    "ep": (["--ep", "2"], "ep", 2),
    "dp": (["--dp", "2"], "dp", 2),
    "redundant_experts": (["--redundant-experts", "16"], "redundant_experts", 16),
    "quant": (["--quant", "fp8"], "quant", "fp8"),
    "experts": (["--experts", "128"], "experts", 128),
    "topk": (["--topk", "8"], "topk", 8),
    "hidden": (["--hidden", "2048"], "hidden", 2048),
    "intermediate": (["--intermediate", "768"], "intermediate", 768),
    "latent": (["--latent", "1024"], "latent", 1024),
    "shared_experts": (["--shared-experts", "1"], "shared_experts", 1),
    "gated": (["--gated"], "gated", True),
    "not gated": (["--no-gated"], "gated", False),
    "server": (["--server", "vllm"], "server", "vllm"),
    "server_version": (["--server-version", "0.20.0"], "server_version", "0.20.0"),
    "triton_version": (["--triton-version", "3.5.1"], "triton_version", "3.5.1"),
    "runner_backend": (["--runner-backend", "triton"], "runner_backend", "triton"),
    "a2a_backend": (["--a2a-backend", "deepep"], "a2a_backend", "deepep"),
    "server_quantization": (["--server-quantization", "fp8"], "server_quantization", "fp8"),
    "deterministic": (["--deterministic"], "deterministic", True),
    "disable_shared_experts_fusion": (
        ["--disable-shared-experts-fusion"],
        "disable_shared_experts_fusion",
        True,
    ),
    "lora": (["--lora"], "lora", True),
    "enable_fused_moe_sum_all_reduce": (
        ["--enable-fused-moe-sum-all-reduce"],
        "enable_fused_moe_sum_all_reduce",
        True,
    ),
    "server_env": (
        ["--server-env", "A=b=c", "--server-env", "D="],
        "server_environment",
        {"A": "b=c", "D": ""},
    ),
    "flashinfer": (["--flashinfer"], "flashinfer", True),
    "no flashinfer": (["--no-flashinfer"], "flashinfer", False),
    "assume_triton": (["--assume-triton"], "assume_triton", True),
    "gpu": (["--gpu", "NVIDIA H200", "--gpu", "NVIDIA L4"], "gpu", ("NVIDIA H200", "NVIDIA L4")),
    "compute_capability": (["--compute-capability", "9.0"], "compute_capability", "9.0"),
    "m": (["--m", "64:3,1"], "m", ((1, 1.0), (64, 3.0))),
    "max_m": (["--max-m", "4096"], "max_m", 4096),
    "offline": (["--offline"], "offline", True),
    "out": (["--out", "there"], "out", "there"),
    "force": (["--force"], "force", True),
    "compile_configs": (["--no-compile"], "compile_configs", False),
    "start_from": (["--start-from", "a.json", "--start-from", "b"], "start_from", ("a.json", "b")),
}
ONLY_TUNE = {"out", "force", "compile_configs", "start_from"}
# These belong to what is done with the answer: test_install.py.
INSTALL = ("install", "root", "yes", "copy_shipped", "state")
# Files of a running server that only plan reads: test_bounds.py.
BOUNDS = ("trace", "server_log")
# These say how to measure: test_measuring.py.
MEASURE = ("budget", "devices", "kernel", "only", "python", "routing", "server_files", "share_gpu")


def parse(command: click.Command, arguments: list[str], kind: type[Request]) -> Request:
    # click empties the list that it is given
    values = dict(command.make_context(command.name, list(arguments)).params)
    for name in ("as_json", "no_color", "exit_zero", "effort", *BOUNDS, *INSTALL, *MEASURE):
        values.pop(name, None)
    return request_from(values, kind)


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_a_flag_sets_its_field_and_nothing_else(flag: str) -> None:
    arguments, field, value = FLAGS[flag]
    for command, kind in ((plan, Request), (tune, TuneRequest)):
        if command is plan and field in ONLY_TUNE:
            continue
        assert parse(command, arguments, kind).changed() == {field: value}


def test_without_flags_nothing_is_said() -> None:
    assert parse(plan, [], Request) == Request()
    assert parse(tune, [], TuneRequest) == TuneRequest()


def test_every_flag_and_every_field_is_here() -> None:
    covered = {field for _, field, _ in FLAGS.values()}
    assert covered == {field.name for field in fields(TuneRequest)}
    shown = {name for parameter in tune.params for name in parameter.opts if name.startswith("--")}
    used = {word for arguments, _, _ in FLAGS.values() for word in arguments if word.startswith("--")}
    used |= {"--compile", "--effort", "--json", "--exit-zero", "--no-color"}
    used |= {f"--{name.replace('_', '-')}" for name in (*INSTALL, *MEASURE)}
    assert shown <= used


def test_every_option_has_a_help_text() -> None:
    for command in (plan, tune):
        assert [p.name for p in command.params if isinstance(p, click.Option) and not p.help] == []


def test_an_assignment_needs_its_equals_sign() -> None:
    with pytest.raises(InputError, match="NAME=VALUE"):
        parse(plan, ["--server-env", "NAME"], Request)


def test_exit_codes() -> None:
    assert len(OUTPUT) == 3
    assert (exit_code(True, False), exit_code(False, False), exit_code(False, True)) == (0, 1, 0)


def test_an_effort_that_nobody_knows_is_refused() -> None:
    with pytest.raises(click.BadParameter):
        tune.make_context("tune", ["--effort", "heroic"])
