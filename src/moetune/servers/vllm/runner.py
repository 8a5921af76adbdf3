"""Which MoE backend a release of vLLM chooses, and whether it reads the tuned Triton file.

The rules are data (`servers/data/vllm_runners.json`); here the facts are gathered that they ask about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.servers.runner_facts import compute_capability, fits_marlin, flag, scheme
from moetune.servers.runner_rule_data import packaged_rules
from moetune.servers.runner_rules import Decision, Fact, RuleBook, decide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moetune.domain.gpu import Gpu
    from moetune.domain.model import ExpertLayer
    from moetune.domain.problem import Parallelism
    from moetune.domain.version import Release
    from moetune.servers.protocol import RunnerVerdict, ServerOptions

_DEFAULT_DISPATCH = "allgather_reducescatter"
# Names under which a release hands the work to another all2all backend.
_DISPATCH_ALIASES = {"none": _DEFAULT_DISPATCH, "naive": _DEFAULT_DISPATCH}
# Models whose text config vLLM takes DeepGEMM off for, by the beginning of their model type.
_FAMILIES = {"qwen3_5_moe": "Qwen3_5Moe", "kolibri1": "Kolibri1"}


def choose_runner(
    version: Release,
    layer: ExpertLayer,
    parallelism: Parallelism,
    gpu: Gpu,
    options: ServerOptions,
) -> RunnerVerdict:
    """Which backend this release chooses, by the first rule that holds."""
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
    return packaged_rules("vllm_runners.json")


def runner_facts(
    layer: ExpertLayer, parallelism: Parallelism, gpu: Gpu, options: ServerOptions
) -> dict[str, Fact]:
    """The facts that the rules ask about."""
    quantization = layer.quantization
    environment = options.environment
    expert_parallel = parallelism.ep > 1
    ranks = max(parallelism.tp * parallelism.dp, 1)
    columns = layer.intermediate_size if expert_parallel else layer.intermediate_size // ranks
    group = quantization.group_size
    return {
        "arch": layer.architecture,
        "family": _family(layer),
        "scheme": scheme(quantization, options.quantization),
        "cc": compute_capability(gpu),
        "vendor": gpu.vendor.lower(),
        "backend": options.moe_runner_backend,
        "dispatch": _dispatch(parallelism, options),
        "ep": expert_parallel and ranks > 1,
        "dp": parallelism.dp,
        "tp": 1 if expert_parallel else ranks,
        "flashinfer": options.flashinfer is not False,
        "flashinfer_fp16": _switch(environment, "VLLM_USE_FLASHINFER_MOE_FP16"),
        "flashinfer_fp8": _switch(environment, "VLLM_USE_FLASHINFER_MOE_FP8"),
        "deep_gemm": _switch(environment, "VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"),
        "deep_gemm_global": _switch(environment, "VLLM_USE_DEEP_GEMM"),
        "deep_gemm_moe": _switch(environment, "VLLM_MOE_USE_DEEP_GEMM"),
        "e8m0": flag(environment, "VLLM_USE_DEEP_GEMM_E8M0") is not False,
        "force_marlin": flag(environment, "VLLM_TEST_FORCE_FP8_MARLIN") or False,
        "int4_flashinfer": flag(environment, "VLLM_USE_FLASHINFER_MOE_INT4") or False,
        "aiter": bool(flag(environment, "VLLM_ROCM_USE_AITER"))
        and flag(environment, "VLLM_ROCM_USE_AITER_MOE") is not False,
        "lora": options.enable_lora,
        "invariant": options.deterministic or bool(flag(environment, "VLLM_BATCH_INVARIANT")),
        "gated": layer.gated,
        "bias": layer.bias,
        "group": group or 0,
        "symmetric": not quantization.zero_point,
        "bits": quantization.dtype.weight_bits,
        "fits_marlin": fits_marlin(layer.hidden_size, columns, group, padded=False),
        "fits_padded": fits_marlin(layer.hidden_size, columns, group, padded=True),
        "columns_128": columns % 128 == 0,
        "kernel": "",
    }


def _family(layer: ExpertLayer) -> str:
    for model_type, architecture in _FAMILIES.items():
        if layer.model_type.startswith(model_type) or layer.architecture.startswith(architecture):
            return model_type
    return "other"


def _dispatch(parallelism: Parallelism, options: ServerOptions) -> str:
    """The all2all backend in use: none without data parallelism and parallel experts together."""
    if parallelism.ep <= 1 or parallelism.dp <= 1:
        return "none"
    return _DISPATCH_ALIASES.get(options.moe_a2a_backend, options.moe_a2a_backend)


def _switch(environment: Mapping[str, str], *names: str) -> str:
    """`off` when one of the variables turns it off, `on` when one is set and none does, else `unset`."""
    values = [value for value in (flag(environment, name) for name in names) if value is not None]
    if not values:
        return "unset"
    return "on" if all(values) else "off"
