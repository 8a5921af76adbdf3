"""Which runner SGLang chooses: against its own code in every wheel, and as a user relies on it."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest

from moetune.domain.gpu import Gpu
from moetune.domain.problem import Parallelism
from moetune.domain.quantization import Quantization
from moetune.domain.version import parse_release
from moetune.servers.protocol import Applies, RunnerVerdict, ServerOptions
from moetune.servers.sglang.runner import choose_runner, explain_runner, runner_facts, runner_rules
from tests.servers import runner_inputs as use
from tests.servers.runner_inputs import AMD, candidates, layer, nvidia
from tests.servers.sglang_method_oracle import built_runner
from tests.servers.sglang_runner_oracle import INSPECTED, Setup, resolved_runner
from tests.wheels import members, read_member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moetune.servers.runner_rules import Decision, Rule

NEWEST = INSPECTED[-1]
QWEN35 = "Qwen3_5MoeForConditionalGeneration"
YES, NO, PARTLY, UNKNOWN = Applies.YES, Applies.NO, Applies.PARTLY, Applies.UNKNOWN


def explain(
    version: str = NEWEST,
    quantization: Quantization = use.BF16,
    capability: int | None = 90,
    architecture: str = "SomeForCausalLM",
    *,
    gpu: Gpu | None = None,
    parallelism: Parallelism | None = None,
    intermediate: int = 1024,
    quantization_flag: str | None = None,
    **options: Any,
) -> Decision:
    return explain_runner(
        parse_release(version),
        layer(quantization, architecture, intermediate=intermediate),
        parallelism or Parallelism(),
        gpu or nvidia(capability),
        ServerOptions(quantization=quantization_flag, **options),
    )


def verdict(*args: Any, **kwargs: Any) -> RunnerVerdict:
    return explain(*args, **kwargs).verdict


# --- what a user relies on --------------------------------------------------------------------------


def test_qwen35_in_bf16_on_sm120_runs_in_triton() -> None:
    chosen = choose_runner(
        (0, 5, 23),
        layer(use.BF16, QWEN35, hidden=3072),
        Parallelism(tp=4),
        nvidia(120),
        ServerOptions(),
    )
    assert (chosen.runner, chosen.applies, chosen.certainty) == ("triton", YES, "run")
    assert "unquant.py" in chosen.source
    assert resolved_runner("0.5.23", Setup(arch=QWEN35, cc=120, tp=4)) == "auto"


def test_qwen35_in_bf16_on_sm100_does_not() -> None:
    chosen = verdict(NEWEST, use.BF16, 100, QWEN35)
    assert (chosen.runner, chosen.applies) == ("flashinfer_trtllm", NO)
    assert chosen.force_triton == "--moe-runner-backend triton"
    assert "sm_100" in chosen.reason
    assert verdict(NEWEST, use.BF16, 100, QWEN35, moe_runner_backend="triton").applies is YES


@pytest.mark.parametrize(
    ("options", "quantization"),
    [
        ({"moe_runner_backend": "deep_gemm"}, use.FP8_BLOCK),
        ({"moe_runner_backend": "flashinfer_trtllm"}, use.BF16),
        ({"moe_runner_backend": "flashinfer_cutlass"}, use.BF16),
        ({"moe_runner_backend": "cutlass"}, use.FP8_BLOCK),
        ({"moe_a2a_backend": "deepep"}, use.FP8_BLOCK),
        ({}, use.AWQ),
        ({}, use.GPTQ),
    ],
)
def test_case_04_another_runner_is_not_applicable(
    options: dict[str, Any], quantization: Quantization
) -> None:
    chosen = verdict(NEWEST, quantization, 90, **options)
    assert chosen.applies is NO
    assert chosen.force_triton, "there is a way to Triton, and it is named"


@pytest.mark.parametrize("version", ["0.5.5", "0.5.12", "0.5.23"])
@pytest.mark.parametrize("quantization", [use.BF16, use.FP8_BLOCK, use.AWQ])
def test_case_05_deterministic_inference_ignores_every_file(version: str, quantization: Quantization) -> None:
    chosen = verdict(version, quantization, 90, deterministic=True)
    assert chosen.applies is NO
    assert "Deterministic inference is enabled" in chosen.evidence
    assert chosen.force_triton == "drop --enable-deterministic-inference"


def test_deterministic_inference_reads_the_file_before_0_5_5() -> None:
    assert verdict("0.5.4", deterministic=True).applies is YES


@pytest.mark.parametrize(
    ("quantization", "capability", "version"),
    [
        (Quantization(method="fancy8"), 90, NEWEST),
        (use.EXPERTS_INT8, 90, NEWEST),
        (use.FP4_EXPERTS, 80, NEWEST),
        (use.AWQ, 75, NEWEST),
        (use.BF16, None, NEWEST),
        (use.BF16, 90, "0.5.1"),
    ],
)
def test_without_a_rule_it_says_unknown(
    quantization: Quantization, capability: int | None, version: str
) -> None:
    architecture = QWEN35 if capability is None else "SomeForCausalLM"
    if quantization.method == "fancy8":
        quantization = Quantization(use.FP8_BLOCK.dtype, "fancy8")
    chosen = verdict(version, quantization, capability, architecture)
    assert (chosen.runner, chosen.applies, chosen.certainty) == ("", UNKNOWN, "none")


def test_the_compute_capability_is_only_asked_for_where_it_matters() -> None:
    assert verdict(NEWEST, use.BF16, None).applies is YES
    assert "the compute capability" in verdict(NEWEST, use.BF16, None, QWEN35).reason


def test_intel_has_no_rule() -> None:
    assert verdict(gpu=Gpu("Intel(R) Arc(TM) Pro B60 Graphics", vendor="Intel")).applies is UNKNOWN


def test_a_release_between_wheels_is_inferred_where_the_next_one_differs() -> None:
    changed = verdict("0.5.8", use.BF16, 100, QWEN35)
    assert (changed.runner, changed.certainty) == ("triton", "inferred")
    assert "0.5.9 differs" in changed.reason
    same = verdict("0.5.8", use.BF16, 90, QWEN35)
    assert (same.runner, same.certainty) == ("triton", "run")
    future = verdict("0.6.0", use.BF16, 90)
    assert (future.runner, future.certainty) == ("triton", "inferred")


def test_gpt_oss_on_blackwell_in_bf16_depends_on_the_driver() -> None:
    chosen = verdict(NEWEST, use.BF16, 120, "GptOssForCausalLM")
    assert chosen.applies is UNKNOWN
    assert "driver" in chosen.reason


# --- the method table of the specification, row by row ----------------------------------------------

METHOD_TABLE = [
    # quantization, options, capability or gpu, version, runner, applies
    ("unquantized", use.BF16, {}, 90, NEWEST, "triton", YES),
    ("unquantized, flag", use.BF16, {"moe_runner_backend": "triton"}, 90, NEWEST, "triton", YES),
    ("fp8 block", use.FP8_BLOCK, {}, 90, NEWEST, "triton", YES),
    ("fp8 tensor", use.FP8_STATIC, {}, 89, NEWEST, "triton", YES),
    ("fp8, flag", use.FP8_BLOCK, {"moe_runner_backend": "triton"}, 100, NEWEST, "triton", YES),
    ("fp8 deepep", use.FP8_BLOCK, {"moe_a2a_backend": "deepep"}, 90, NEWEST, "deep_gemm", NO),
    ("fp8 mooncake", use.FP8_BLOCK, {"moe_a2a_backend": "mooncake"}, 90, "0.5.6", "deep_gemm", NO),
    ("fp8 nixl", use.FP8_STATIC, {"moe_a2a_backend": "nixl"}, 100, "0.5.12", "deep_gemm", NO),
    ("fp8 old gpu", use.FP8_BLOCK, {}, 80, NEWEST, "triton", YES),
    ("fp8 on sm_100, another model", use.FP8_BLOCK, {}, 100, NEWEST, "triton", YES),
    ("w8a8_fp8", use.W8A8_FP8, {"moe_runner_backend": "deep_gemm"}, 90, NEWEST, "triton", YES),
    ("w8a8_int8", use.W8A8_INT8, {"moe_runner_backend": "deep_gemm"}, 80, NEWEST, "triton", YES),
    ("blockwise_int8", use.BLOCK_INT8, {"moe_runner_backend": "cutlass"}, 80, NEWEST, "triton", YES),
    ("moe_wna16", use.AWQ, {"quantization_flag": "moe_wna16"}, 90, NEWEST, "triton", YES),
    ("moe_wna16 of gptq", use.GPTQ, {"quantization_flag": "moe_wna16"}, 120, NEWEST, "triton", YES),
    ("ct fp8", use.CT_CHANNEL, {}, 90, NEWEST, "triton", YES),
    ("ct fp8, flag", use.CT_STATIC, {"moe_runner_backend": "triton"}, 100, NEWEST, "triton", YES),
    ("ct w4a16", use.CT_INT4, {}, 90, NEWEST, "marlin", NO),
    ("ct w4a16, flag", use.CT_INT4, {"moe_runner_backend": "triton"}, 90, "0.5.12", "triton", YES),
    ("ct w4a16, flag too early", use.CT_INT4, {"moe_runner_backend": "triton"}, 90, "0.5.10", "marlin", NO),
    ("ct w4a16 g64, flag", use.CT_INT4_64, {"moe_runner_backend": "triton"}, 90, NEWEST, "refused", NO),
    ("ct w4a16 sm100", use.CT_INT4, {}, 100, NEWEST, "triton", YES),
    ("ct w4a16 sm100 early", use.CT_INT4, {}, 100, "0.5.18", "marlin", NO),
    ("ct w4a16 g64 sm100", use.CT_INT4_64, {}, 100, NEWEST, "marlin", NO),
    ("ct w4a16 rocm", use.CT_INT4, {}, AMD, "0.5.9", "triton", YES),
    ("awq", use.AWQ, {}, 80, NEWEST, "marlin", NO),
    ("awq, flag", use.AWQ, {"moe_runner_backend": "triton"}, 80, "0.5.9", "refused", NO),
    ("gptq", use.GPTQ, {}, 90, NEWEST, "marlin", NO),
    ("gptq, flag", use.GPTQ, {"moe_runner_backend": "triton"}, 90, NEWEST, "refused", NO),
    ("gptq explicit", use.GPTQ, {"quantization_flag": "gptq"}, 90, NEWEST, "refused", NO),
    ("mxfp4 upcast", use.MXFP4, {"moe_runner_backend": "triton"}, 90, NEWEST, "triton", YES),
    ("modelopt_fp8", use.MODELOPT_FP8, {}, 90, NEWEST, "triton", YES),
    ("nvfp4 hopper", use.NVFP4, {}, 90, "0.5.15", "marlin", NO),
    ("nvfp4 sm120", use.NVFP4, {"quantization_flag": "modelopt_fp4"}, 120, NEWEST, "as named", NO),
    ("nvfp4, flag", use.NVFP4, {"moe_runner_backend": "triton"}, 100, NEWEST, "as named", NO),
    ("gguf", use.GGUF, {}, 90, NEWEST, "ggml_moe", NO),
    ("w4afp8", use.W4AFP8, {}, 90, NEWEST, "cutlass w4a8", NO),
    ("bitsandbytes", use.BITSANDBYTES, {"moe_runner_backend": "deep_gemm"}, 90, NEWEST, "triton", YES),
    ("bitsandbytes too early", use.BITSANDBYTES, {}, 90, "0.5.6", "", UNKNOWN),
    ("bf16 rocm", use.BF16, {}, AMD, NEWEST, "triton", YES),
    ("lora", use.BF16, {"enable_lora": True}, 90, NEWEST, "triton", YES),
    ("lora_triton", use.BF16, {"moe_runner_backend": "lora_triton"}, 90, NEWEST, "lora_triton", YES),
    ("hpc_ops", use.FP8_BLOCK, {"moe_runner_backend": "hpc_ops"}, 90, NEWEST, "hpc_ops", NO),
    ("hpc_ops on bf16", use.BF16, {"moe_runner_backend": "hpc_ops"}, 90, NEWEST, "refused", NO),
    ("deep_gemm ignored", use.BF16, {"moe_runner_backend": "deep_gemm"}, 90, "0.5.6", "triton", YES),
    ("deep_gemm", use.BF16, {"moe_runner_backend": "deep_gemm"}, 90, "0.5.12", "deep_gemm", NO),
    ("no such runner yet", use.BF16, {"moe_runner_backend": "marlin"}, 90, "0.5.11", "refused", NO),
]


@pytest.mark.parametrize(
    ("quantization", "options", "where", "version", "runner", "applies"),
    [row[1:] for row in METHOD_TABLE],
    ids=[row[0] for row in METHOD_TABLE],
)
def test_method_table(
    quantization: Quantization,
    options: dict[str, Any],
    where: int | Gpu,
    version: str,
    runner: str,
    applies: Applies,
) -> None:
    gpu = where if isinstance(where, Gpu) else nvidia(where)
    chosen = verdict(version, quantization, gpu=gpu, **options)
    assert (chosen.runner, chosen.applies) == (runner, applies)


@pytest.mark.parametrize(
    ("quantization", "version", "environment", "runner", "applies"),
    [
        (use.BF16, "0.5.6", {"SGLANG_USE_AITER": "1"}, "aiter", NO),
        (use.BF16, NEWEST, {"SGLANG_USE_AITER": "1"}, "aiter, triton where the shape is unsupported", PARTLY),
        (use.FP8_BLOCK, NEWEST, {"SGLANG_USE_AITER": "1"}, "aiter", NO),
        (use.FP8_BLOCK, NEWEST, {"SGLANG_USE_AITER": "0"}, "triton", YES),
        (use.CT_CHANNEL, "0.5.12", {"SGLANG_USE_AITER": "true"}, "aiter", NO),
        (use.MXFP4, NEWEST, {"SGLANG_USE_AITER": "1"}, "aiter", NO),
        (use.MXFP8, NEWEST, {}, "triton (a separate mxfp8 kernel)", NO),
    ],
)
def test_rocm(
    quantization: Quantization, version: str, environment: dict[str, str], runner: str, applies: Applies
) -> None:
    chosen = verdict(version, quantization, gpu=AMD, environment=environment)
    assert (chosen.runner, chosen.applies) == (runner, applies)


def test_awq_of_a_shape_that_marlin_refuses_falls_back_to_triton() -> None:
    fits = verdict(NEWEST, use.AWQ, 90, intermediate=768, parallelism=Parallelism(tp=2))
    falls_back = verdict(NEWEST, use.AWQ, 90, intermediate=768, parallelism=Parallelism(tp=4))
    assert (fits.runner, falls_back.runner) == ("marlin", "triton")
    expert_parallel = verdict(NEWEST, use.AWQ, 90, intermediate=768, parallelism=Parallelism(tp=4, ep=4))
    assert expert_parallel.runner == "marlin", "expert parallelism leaves the columns whole"


def test_deepep_without_deep_gemm_stops() -> None:
    chosen = verdict(
        NEWEST,
        use.FP8_BLOCK,
        90,
        moe_a2a_backend="deepep",
        environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
    )
    assert (chosen.runner, chosen.applies) == ("refused", NO)


def test_expert_parallel_fp8_ran_in_deep_gemm_up_to_0_5_3() -> None:
    for version, runner in (("0.5.3", "deep_gemm"), ("0.5.4", "triton")):
        assert verdict(version, use.FP8_BLOCK, 90, parallelism=Parallelism(tp=4, ep=4)).runner == runner


GPT_OSS_TABLE = {
    # version: sm90 and older, sm100, sm120, ep > 1 off Blackwell
    "0.5.6": ("triton_kernel", "flashinfer_mxfp4", "flashinfer_mxfp4", "auto"),
    "0.5.12": ("triton_kernel", "flashinfer_mxfp4", "triton_kernel", "auto"),
    "0.5.15": ("triton_kernel", "flashinfer_mxfp4", "marlin", "auto"),
    "0.5.20": ("triton_kernel", "flashinfer_mxfp4", "flashinfer_mxfp4", "auto"),
    "0.5.23": ("triton_kernel", "flashinfer_mxfp4", "flashinfer_mxfp4", "auto"),
}


@pytest.mark.parametrize("version", GPT_OSS_TABLE)
@pytest.mark.parametrize("column", range(4))
def test_gpt_oss_table(version: str, column: int) -> None:
    capability = (90, 100, 120, 90)[column]
    ep = 2 if column == 3 else 1
    setup = Setup(
        arch="GptOssForCausalLM",
        quantization_config={"quant_method": "mxfp4"},
        cc=capability,
        tp=ep,
        ep=ep,
    )
    assert resolved_runner(version, setup) == GPT_OSS_TABLE[version][column]
    decision = explain(
        version, use.MXFP4, capability, "GptOssForCausalLM", parallelism=Parallelism(tp=ep, ep=ep)
    )
    assert decision.verdict.applies is (YES if column == 3 else NO)
    assert decision.verdict.force_triton == ("" if column == 3 else "--moe-runner-backend triton")


# --- against SGLang's own code ----------------------------------------------------------------------

CHECKPOINTS: dict[str, tuple[Quantization, dict[str, Any] | None, str | None]] = {
    "bf16": (use.BF16, None, None),
    "fp8": (use.FP8_BLOCK, {"quant_method": "fp8"}, None),
    "mxfp4": (use.MXFP4, {"quant_method": "mxfp4"}, None),
    "modelopt fp8": (use.MODELOPT_FP8, {"quant_method": "modelopt", "quant_algo": "FP8"}, None),
    "modelopt fp4": (use.NVFP4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
    "modelopt_fp8": (use.MODELOPT_FP8, {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt_fp8"),
    "modelopt_fp4": (use.NVFP4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4"),
    "online fp8": (use.BF16, None, "fp8"),
    "awq": (use.AWQ, {"quant_method": "awq"}, None),
    "ct int4": (
        use.CT_INT4_32,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int"}}
            },
        },
        None,
    ),
    "ct fp8": (use.CT_CHANNEL, {"quant_method": "compressed-tensors"}, None),
    "fp4 experts": (use.FP4_EXPERTS, {"quant_method": "fp8"}, None),
    "kimi-k3": (
        use.CT_MXFP4,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"format": "mxfp4-pack-quantized"}},
        },
        None,
    ),
}
DEPLOYMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"a2a": "deepep"},
    {"ep": 2, "tp": 2},
    {"runner": "triton"},
    {"runner": "deep_gemm"},
    {"rocm": True, "environment": {"SGLANG_USE_AITER": "1"}},
    {"redundant_experts": 8},
)


def architectures() -> tuple[str, ...]:
    """All that some rule names, and one that none does."""
    named = {
        str(value)
        for item in runner_rules().rules
        for condition in item.conditions
        if condition.fact == "arch"
        for value in condition.values or ()
    }
    return ("SomeForCausalLM", "MixtralForCausalLM", "Ernie4_5_VLMoeForConditionalGeneration", *sorted(named))


def resolved_by_rules(version: str, setup: Setup, quantization: Quantization) -> str:
    """`--moe-runner-backend` after our first stages."""
    known = runner_facts(
        layer(quantization, setup.arch),
        Parallelism(tp=setup.tp, ep=setup.ep, redundant_experts=setup.redundant_experts),
        AMD if setup.rocm else nvidia(setup.cc),
        ServerOptions(
            moe_runner_backend=setup.runner,
            moe_a2a_backend=setup.a2a,
            quantization=setup.quantization,
            environment=setup.environment,
        ),
    )
    known["driver_595"] = setup.driver >= (595,)
    for stage in runner_rules().stages[1:3]:
        for item in stage:
            if item.holds(parse_release(version), known):
                known |= dict(item.sets)
                break
    return str(known["runner"])


def setups() -> Iterator[tuple[str, Setup]]:
    for architecture, name in itertools.product(architectures(), CHECKPOINTS):
        _, config, requested = CHECKPOINTS[name]
        deployments = DEPLOYMENTS if name in ("bf16", "fp8", "modelopt_fp4") else DEPLOYMENTS[:1]
        for deployment in deployments:
            for capability in (90,) if deployment.get("rocm") else (80, 90, 100, 110, 120):
                if deployment and capability not in (90, 100):
                    continue
                yield (
                    name,
                    Setup(
                        arch=architecture,
                        quantization_config=config,
                        quantization=requested,
                        cc=capability,
                        fp4_experts=name == "fp4 experts",
                        **deployment,
                    ),
                )


@pytest.mark.parametrize("version", INSPECTED)
def test_overrides_equal_the_servers_own(version: str) -> None:
    compared = refused = 0
    for name, setup in setups():
        theirs = resolved_runner(version, setup)
        ours = resolved_by_rules(version, setup, CHECKPOINTS[name][0])
        if theirs.startswith("error"):
            refused += 1
            continue
        compared += 1
        assert ours == theirs, (version, name, setup)
    assert compared > 3000
    assert refused < compared / 10


def test_gpt_oss_with_a_new_driver_equals_the_servers_own() -> None:
    for version, capability in itertools.product(INSPECTED, (90, 100, 110, 120)):
        for driver in ((590,), (595, 40)):
            setup = Setup(arch="GptOssForCausalLM", cc=capability, driver=driver)
            assert resolved_by_rules(version, setup, use.BF16) == resolved_runner(version, setup), (
                version,
                setup,
            )


METHODS: dict[str, tuple[tuple[Quantization, str | None], ...]] = {
    "bf16": ((use.BF16, None),),
    "fp8": ((use.FP8_BLOCK, None), (use.FP8_STATIC, None), (use.FP8_DYNAMIC, None), (use.BF16, "fp8")),
    "w8a8_fp8": ((use.W8A8_FP8, None),),
    "w8a8_int8": ((use.W8A8_INT8, None),),
    "blockwise_int8": ((use.BLOCK_INT8, None),),
    "moe_wna16": ((use.AWQ, "moe_wna16"), (use.GPTQ, "moe_wna16")),
    "ct-fp8": ((use.CT_CHANNEL, None),),
    "modelopt_fp8": ((use.MODELOPT_FP8, None),),
    "mxfp4": ((use.MXFP4, None),),
    "awq": ((use.AWQ, None),),
    "gptq": ((use.GPTQ, None),),
    "quark-fp8": ((use.QUARK_FP8, None),),
}
RUNNERS = (
    *("auto", "triton", "triton_kernel", "deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed"),
    *(
        "flashinfer_cutlass",
        "flashinfer_mxfp4",
        "flashinfer_cutedsl",
        "cutlass",
        "marlin",
        "aiter",
        "humming",
    ),
)


@pytest.mark.parametrize("method", METHODS)
def test_methods_equal_the_servers_own(method: str) -> None:
    """Every verdict that is marked `run` is what the wheel's own method builds."""
    compared = 0
    for (quantization, requested), version, runner in itertools.product(METHODS[method], INSPECTED, RUNNERS):
        for capability, rocm, environment in (
            (80, False, {}),
            (90, False, {}),
            (120, False, {}),
            (90, True, {}),
            (90, True, {"SGLANG_USE_AITER": "1"}),
        ):
            setup = Setup(cc=capability, runner=runner, rocm=rocm, environment=environment)
            decision = explain(
                version,
                quantization,
                gpu=AMD if rocm else nvidia(capability),
                moe_runner_backend=runner,
                quantization_flag=requested,
                environment=environment,
            )
            if decision.verdict.certainty != "run":
                continue
            built = built_runner(version, setup, method, runner)
            if built is None:
                continue
            compared += 1
            applies = {"triton": YES}.get(built, NO)
            if decision.rules[-1] == "bf16-aiter":
                applies = PARTLY
            assert decision.verdict.applies is applies, (version, setup, built, decision)
            shown = "refused" if built.startswith("error") else built
            assert decision.verdict.runner.startswith(shown), (version, setup, built, decision)
    assert compared > 50


def test_deepep_builds_deep_gemm_at_every_token_count() -> None:
    for version in INSPECTED[INSPECTED.index("0.5.4") :]:
        assert built_runner(version, Setup(cc=90, a2a="deepep"), "fp8", "auto") == "deep_gemm"
        chosen = verdict(version, use.FP8_BLOCK, 90, moe_a2a_backend="deepep")
        assert (chosen.runner, chosen.applies) == ("deep_gemm", NO)


@pytest.mark.parametrize("version", INSPECTED[INSPECTED.index("0.5.5") :])
def test_the_variable_for_cutlass_is_read_up_to_0_5_16(version: str) -> None:
    sources = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/overrides.py")
    held = set(members("sglang", version)).intersection(sources)
    asked = re.compile(r'SGLANG_CUTLASS_MOE(?:\.get\(\)|["\'][,)])')
    reads = any(asked.search(read_member("sglang", version, name)) for name in held)
    chosen = verdict(version, use.FP8_BLOCK, 90, environment={"SGLANG_CUTLASS_MOE": "1"})
    assert (chosen.runner == "cutlass") is reads


# --- the rules hang together ------------------------------------------------------------------------


def inputs_for(rule: Rule) -> Iterator[dict[str, Any]]:
    """Deployments that could meet the conditions of a rule."""
    environments = {
        "aiter": "SGLANG_USE_AITER",
        "jit": "SGLANG_ENABLE_JIT_DEEPGEMM",
        "cutlass_moe": "SGLANG_CUTLASS_MOE",
    }
    environment = {
        variable: "1" if candidates(rule, fact, [False])[0] else "0"
        for fact, variable in environments.items()
    }
    environment["SGLANG_ENABLE_JIT_DEEPGEMM"] = "1" if candidates(rule, "jit", [True])[0] else "0"
    gpus = [
        AMD if vendor == "amd" else nvidia(int(str(capability)))
        for vendor in candidates(rule, "vendor", ["nvidia"])
        for capability in candidates(rule, "cc", [90])
    ]
    backends = [
        *candidates(rule, "backend", ["auto"], ["triton", "no_such_runner"]),
        *candidates(rule, "runner", ["auto"], ["triton"]),
        "deep_gemm",
    ]
    requested = [
        None if word == "none" else str(word)
        for word in [
            *candidates(rule, "cli", ["none"]),
            "moe_wna16",
            "gptq",
            "modelopt_fp4",
            "modelopt_mixed",
        ]
    ]
    for version, architecture, (quantization, word), gpu, backend, a2a, shape in itertools.product(
        {rule.since, rule.until},
        candidates(rule, "arch", ["SomeForCausalLM"])[:3],
        use.checkpoints(rule, requested),
        gpus,
        dict.fromkeys(backends),
        candidates(rule, "a2a", ["none"], ["mori"]),
        (1024, 96),
    ):
        yield {
            "version": ".".join(map(str, version)),
            "quantization": quantization,
            "architecture": architecture,
            "gpu": gpu,
            "moe_runner_backend": backend,
            "quantization_flag": word,
            "moe_a2a_backend": a2a,
            "intermediate": shape,
            "environment": environment,
            "deterministic": bool(candidates(rule, "deterministic", [False])[0]),
            "parallelism": Parallelism(
                tp=2,
                ep=int(str(candidates(rule, "ep", [1])[0])),
                redundant_experts=int(bool(candidates(rule, "remap", [False])[0])),
            ),
        }


@pytest.mark.parametrize("rule", runner_rules().rules, ids=lambda rule: rule.name)
def test_every_rule_can_be_reached(rule: Rule) -> None:
    assert any(rule.name in explain(**inputs).rules for inputs in inputs_for(rule))


FORCES: dict[str, dict[str, Any]] = {
    "--moe-runner-backend triton": {"moe_runner_backend": "triton"},
    "--quantization moe_wna16": {"quantization_flag": "moe_wna16"},
    "--moe-a2a-backend none": {"moe_a2a_backend": "none"},
}


def test_what_selects_triton_selects_triton() -> None:
    """The flag that a NOT APPLICABLE names leads to Triton, or to the next thing that it names."""
    tried = 0
    for version, quantization, capability, architecture in itertools.product(
        INSPECTED[1::3],
        use.ALL_QUANTIZATIONS,
        (80, 90, 100, 120),
        ("SomeForCausalLM", QWEN35, "GptOssForCausalLM"),
    ):
        for options in ({}, {"moe_runner_backend": "flashinfer_trtllm"}, {"moe_a2a_backend": "deepep"}):
            inputs: dict[str, Any] = {
                "version": version,
                "quantization": quantization,
                "capability": capability,
                "architecture": architecture,
                **options,
            }
            chosen = verdict(**inputs)
            for _ in range(3):
                if chosen.force_triton not in FORCES:
                    break
                inputs |= FORCES[chosen.force_triton]
                if chosen.force_triton == "--quantization moe_wna16":
                    inputs["moe_runner_backend"] = "auto"
                chosen = verdict(**inputs)
                tried += 1
            assert chosen.force_triton not in FORCES, (inputs, chosen)
            if tried and inputs.get("moe_runner_backend") == "triton":
                assert chosen.applies in (YES, UNKNOWN) or not chosen.force_triton, (inputs, chosen)
    assert tried > 300
