from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from moetune.servers.step_parts import StepPart, StepSpan, part_of, span_of
from tests.wheels import read_member

NAMES = {
    "fused_moe_kernel": StepPart("moe gemm", "Triton"),
    "fused_moe_kernel_0d1d2d3de": StepPart("moe gemm", "Triton"),
    "fused_moe_kernel_gptq_awq": StepPart("moe gemm", "Triton"),
    "void marlin_moe_wna16::Marlin<__nv_bfloat16, 4l, 256>(int4 const*)": StepPart("moe gemm", "Marlin"),
    "_p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x128x1_swiglu": StepPart("moe gemm", "triton_kernels"),
    "bmm_E4m3_E4m3E4m3_Fp32_t128x8x128u2": StepPart("moe gemm", "FlashInfer TRT-LLM"),
    "batched_triton_kernel": StepPart("moe gemm", "Triton, batched by expert"),
    "void vllm::moe::topkGating<8, 256, 4>(float const*)": StepPart("route"),
    "void vllm::moe::moe_align_block_size_kernel<int>(int const*)": StepPart("align"),
    "void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*)": StepPart("align"),
    "_moe_sum_reduce_kernel": StepPart("sum"),
    "act_and_mul_kernel": StepPart("activation"),
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": StepPart("all-reduce"),
    "fused_moe_kernel_that_is_another": StepPart("other"),
    "nvjet_tst_128x64_64x9_2x1_v_bz_TNT": StepPart("other"),
    "": StepPart("other"),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_kernel_is(name: str) -> None:
    assert part_of(name) == NAMES[name]
    assert part_of(name).tunable is (NAMES[name].runner == "Triton")


SPANS = {
    "step[DECODE bs=64]": StepSpan("sglang", "decode", 64, 64),
    "step[EXTEND bs=3 toks=4096]": StepSpan("sglang", "prefill", 3, 4096),
    "step[EXTEND bs=3 toks=4096 c_sq=1 c_sk=2]": StepSpan("sglang", "prefill", 3, 4096),
    "step[VERIFY bs=8]": StepSpan("sglang", "decode", 8, None),
    "step[TARGET_VERIFY bs=8]": StepSpan("sglang", "decode", 8, None),
    "step[MIXED bs=8]": StepSpan("sglang", "prefill", 8, None),
    "step[IDLE bs=0]": StepSpan("sglang", "unknown", 0, None),
    "execute_context_0(0)_generation_32(32)": StepSpan("vllm", "decode", 32, 32),
    "execute_context_2(4096)_generation_32(32)": StepSpan("vllm", "prefill", 34, 4128),
    "execute_4128_context_2(sq4096sk9sqsq9sqsk9)_generation_32(sq32sk9sqsq9sqsk9)": StepSpan(
        "vllm", "prefill", 34, 4128
    ),
    "execute_new_0_cached_16": StepSpan("vllm", "decode", 16, 16),
    "execute_new_2_cached_16": StepSpan("vllm", "prefill", 18, None),
    "ProfilerStep#3": None,
    "step[]": None,
}


@pytest.mark.parametrize("name", SPANS)
def test_what_a_step_is(name: str) -> None:
    assert span_of(name) == SPANS[name]


WHERE = {
    # Server, release, file: a piece of the expression that names steps there.
    (
        "sglang",
        "0.5.12",
        "sglang/srt/model_executor/model_runner.py",
    ): 'f"step[EXTEND bs={bs} toks={ext_toks}]"',
    ("sglang", "0.5.23", "sglang/srt/utils/profile_utils.py"): 'base = f"step[{stage} bs={bs}',
    ("vllm", "0.33.0", "vllm/v1/worker/gpu_worker.py"): '"execute_context_"',
    ("vllm", "0.12.0", "vllm/v1/worker/gpu_worker.py"): 'f"execute_new_{num_new}_cached_{num_cached}"',
}


@pytest.mark.parametrize("place", WHERE, ids=lambda place: f"{place[0]} {place[1]}")
def test_the_releases_name_their_steps_so(place: tuple[str, str, str]) -> None:
    assert WHERE[place] in read_member(*place)


def test_every_name_in_the_data_is_short_and_has_its_source() -> None:
    data = json.loads((resources.files("moetune.servers") / "data" / "step_parts.json").read_text("utf-8"))
    for item in (*data["parts"], *data["spans"]):
        assert item["source"]
        # Linear time: no repetition without a bound.
        assert not re.search(r"(?<!\\)[*+]", item["pattern"]), item["pattern"]
