"""What a person asks for: a model, its split, a server and GPUs, as plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path

from moetune.domain.errors import InputError
from moetune.domain.keys import LARGEST_M, Traffic, parse_traffic
from moetune.domain.model import LayerOverrides
from moetune.domain.problem import Parallelism
from moetune.domain.server_kernel import OWN
from moetune.servers.protocol import ServerOptions

DEFAULT_MAX_M = 8192
"""Largest prefill chunk that is assumed where neither flag nor log names one (design.md, decision 5)."""

DEFAULT_OUT = "moetune-configs"
"""Directory that files are written to where none is named."""

_LARGEST_SIZE = 1 << 24
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.A)

# Field to the least and the greatest value that makes sense; None is always "not given".
_RANGES = {
    "tp": (1, 4096),
    "ep": (1, 4096),
    "dp": (1, 4096),
    "redundant_experts": (0, 65536),
    "experts": (1, 65536),
    "topk": (1, 65536),
    "hidden": (1, _LARGEST_SIZE),
    "intermediate": (1, _LARGEST_SIZE),
    "latent": (1, _LARGEST_SIZE),
    "shared_experts": (0, 1024),
    "max_m": (1, LARGEST_M),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to moetune. Every field but the model has a default.

    Attributes:
        model: a local `config.json` or its folder, a Hugging Face id, or a packaged checkpoint;
            None when the numbers are given by hand.
        tp: tensor-parallel size.
        ep: expert-parallel size (SGLang); for vLLM any value over 1 stands for
            `--enable-expert-parallel`.
        dp: data-parallel size.
        redundant_experts: experts held twice (EPLB).
        quant: quantization of the expert weights, over what the checkpoint says.
        experts: routed experts of a layer, over what the checkpoint says; likewise the next six.
        topk: experts a token goes to.
        hidden: hidden size.
        intermediate: columns between up and down of one expert.
        latent: columns that enter the experts where a latent projection stands before them.
        shared_experts: experts that every token goes to.
        gated: whether the up kernel writes gate and up.
        server: `sglang`, `vllm` or a plug-in's name; None takes the installed one, else SGLang.
        server_version: its release; None takes the installed one, else the newest known.
        triton_version: its Triton; None takes the installed one, else what that release pins.
        gpu: names of GPUs; empty takes those of this machine.
        compute_capability: `12.0`, for a GPU that the registry does not know.
        m: the user's own keys, `1,64:3,8192` or `((1, 1.0), (64, 3.0))`, with the share of traffic as
            weight; empty takes the keys that cover what a server meets.
        max_m: largest m that the server can meet: its prefill chunk.
        runner_backend: the server's `--moe-runner-backend` or `--moe-backend`.
        a2a_backend: the server's `--moe-a2a-backend` or `--all2all-backend`.
        server_quantization: the server's `--quantization`.
        deterministic: deterministic inference or batch invariance is on.
        disable_shared_experts_fusion: SGLang's flag of that name.
        lora: LoRA is on.
        enable_fused_moe_sum_all_reduce: SGLang's flag of that name.
        server_environment: variables of the server that choose a runner.
        flashinfer: whether flashinfer can be imported there; None assumes what the server pins.
        assume_triton: go on although the runner is not known to be the Triton kernel.
        offline: never ask the network.
    """

    model: str | None = field(default=None, kw_only=False)
    tp: int = 1
    ep: int = 1
    dp: int = 1
    redundant_experts: int = 0
    quant: str | None = None
    experts: int | None = None
    topk: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    latent: int | None = None
    shared_experts: int | None = None
    gated: bool | None = None
    server: str | None = None
    server_version: str | None = None
    triton_version: str | None = None
    gpu: str | tuple[str, ...] | list[str] = ()
    compute_capability: str | None = None
    m: str | Traffic = ()
    max_m: int = DEFAULT_MAX_M
    runner_backend: str = "auto"
    a2a_backend: str = "none"
    server_quantization: str | None = None
    deterministic: bool = False
    disable_shared_experts_fusion: bool = False
    lora: bool = False
    enable_fused_moe_sum_all_reduce: bool = False
    server_environment: Mapping[str, str] = field(default_factory=dict)
    flashinfer: bool | None = None
    assume_triton: bool = False
    offline: bool = False

    def __post_init__(self) -> None:
        for name, (least, greatest) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (type(value) is int and least <= value <= greatest):
                shown = str(value)[:40]
                raise InputError(f"{name} is {shown}, not a whole number from {least} to {greatest}")
        if isinstance(self.m, str):
            object.__setattr__(self, "m", parse_traffic(self.m))
        elif not all(type(m) is int and 1 <= m <= LARGEST_M and 0 < weight < inf for m, weight in self.m):
            raise InputError("m is not made of (tokens, weight) with whole tokens and weights over 0")
        for name in self.server_environment:
            if not _ENVIRONMENT_NAME.fullmatch(name):
                raise InputError(f"{name[:80]!r} is not the name of an environment variable")

    @property
    def gpu_names(self) -> tuple[str, ...]:
        """The GPUs asked for, each once."""
        names = (self.gpu,) if isinstance(self.gpu, str) else tuple(self.gpu)
        return tuple(dict.fromkeys(names))

    @property
    def traffic(self) -> Traffic:
        """The user's own keys with their weights; empty without."""
        return () if isinstance(self.m, str) else self.m

    @property
    def measured_routing(self) -> str:
        """The routing of the problem; the performance model knows the uniform one."""
        return "uniform"

    @property
    def measured_kernel(self) -> str:
        """The kernel source of the problem: what is not measured stands for moetune's own kernel."""
        return OWN

    @property
    def overrides(self) -> LayerOverrides:
        """What is said about the expert layer by hand."""
        return LayerOverrides(
            experts=self.experts,
            topk=self.topk,
            hidden=self.hidden,
            intermediate=self.intermediate,
            latent=self.latent,
            shared_experts=self.shared_experts,
            gated=self.gated,
            quant=self.quant,
        )

    @property
    def parallelism(self) -> Parallelism:
        """The split."""
        return Parallelism(self.tp, self.ep, self.dp, self.redundant_experts)

    @property
    def server_options(self) -> ServerOptions:
        """What of the server's command line changes the problem or its runner."""
        return ServerOptions(
            moe_runner_backend=self.runner_backend,
            moe_a2a_backend=self.a2a_backend,
            quantization=self.server_quantization,
            deterministic=self.deterministic,
            disable_shared_experts_fusion=self.disable_shared_experts_fusion,
            enable_lora=self.lora,
            fused_moe_sum=self.enable_fused_moe_sum_all_reduce,
            environment=dict(self.server_environment),
            flashinfer=self.flashinfer,
        )

    def changed(self) -> dict[str, object]:
        """The fields that differ from their defaults: what the question really says."""
        blank = type(self)()
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if getattr(self, item.name) != getattr(blank, item.name)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest(Request):
    """A question whose answer is written.

    Attributes:
        out: the directory below which the server's files go.
        force: replace files of another problem or another origin.
        compile_configs: compile what is chosen before it is written, where Triton is installed.
        start_from: config files whose entries are candidates too, of any server and GPU.
    """

    out: str | Path = DEFAULT_OUT
    force: bool = False
    compile_configs: bool = True
    start_from: tuple[str | Path, ...] = ()
