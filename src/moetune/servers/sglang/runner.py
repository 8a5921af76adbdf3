"""Which MoE runner a release of SGLang chooses, and whether it reads the tuned Triton file.

The rules are data (`servers/data/sglang_runners.json`); here the facts are gathered that they ask about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.servers.runner_facts import compute_capability, fits_marlin, flag, scheme
from moetune.servers.runner_rule_data import packaged_rules
from moetune.servers.runner_rules import Decision, Fact, RuleBook, decide

if TYPE_CHECKING:
    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Parallelism
    from moetune.domain.version import Release
    from moetune.servers.protocol import RunnerVerdict, ServerOptions


def choose_runner(
    version: Release,
    layer: ExpertLayer,
    parallelism: Parallelism,
    gpu: Gpu,
    options: ServerOptions,
) -> RunnerVerdict:
    """Which runner this release chooses, by the first rule that holds."""
    return explain_runner(version, layer, parallelism, gpu, options).verdict


def explain_runner(
    version: Release,
    layer: ExpertLayer,
    parallelism: Parallelism,
    gpu: Gpu,
    options: ServerOptions,
) -> Decision:
    """The same, with the names of the rules that were taken."""
    return decide(runner_rules(), version, runner_facts(layer, parallelism, gpu, options))


def runner_rules() -> RuleBook:
    """The packaged rules."""
    return packaged_rules("sglang_runners.json")


def runner_facts(
    layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
) -> dict[str, Fact]:
    """The facts that the rules ask about."""
    quantization = layer.quantization
    environment = options.environment
    requested = options.quantization.lower() if options.quantization else None
    expert_ranks = max(parallelism.ep, 1)
    columns = layer.intermediate_size // max(parallelism.tp // expert_ranks, 1)
    return {
        "arch": layer.architecture,
        "scheme": scheme(quantization, requested),
        # As `get_quantization_config` reads it: ModelOpt stays one word, whatever the algorithm.
        "quant": requested or quantization.method.lower(),
        "cli": requested or "none",
        "method": quantization.method.lower(),
        "cc": compute_capability(gpu),
        "vendor": gpu.vendor.lower(),
        "backend": options.moe_runner_backend,
        "a2a": options.moe_a2a_backend,
        "ep": expert_ranks,
        "aiter": flag(environment, "SGLANG_USE_AITER") or False,
        "jit": flag(environment, "SGLANG_ENABLE_JIT_DEEPGEMM") is not False,
        "cutlass_moe": flag(environment, "SGLANG_CUTLASS_MOE") or False,
        "dequant_fp4": flag(environment, "SGLANG_DSV4_FP4_DEQUANT") or False,
        "deterministic": options.deterministic,
        "group": quantization.group_size or 0,
        "symmetric": not quantization.zero_point,
        "bits": quantization.dtype.weight_bits,
        "remap": parallelism.redundant_experts > 0,
        "fits_marlin": fits_marlin(layer.hidden_size, columns, quantization.group_size, padded=False),
        "driver_595": None,
        "runner": options.moe_runner_backend,
    }
