"""How far a kernel's result may lie from the fp32 reference, by what is rounded on the way.

Relative error of the whole result: norm of the difference over norm of the reference. The inputs are
the same rounded values for both, so what is left is the rounding of the output and the order of an
fp32 sum. A bf16 has 8 bits: rounded to nearest that is 1.7e-3, cut off, as Triton's interpreter does,
3.4e-3. An fp16 has 11 bits: an eighth of it. The sums of fp8 products, which Hopper's tensor cores keep
in fewer than 32 bits within one tile, stay below the rounding of the output; without block scales they
stay there from the first tile to the last, as in the servers, and twice as much is allowed. Products of
int8 are exact. Where the kernel adds the topk results of a token in the output's type, each addition
rounds: of n results of one size the i-th sum has a variance of i, and all roundings together that of
(n + 1) / 2 results more. Weights that are dequantized are rounded once more, to the type of the activations,
before the dot; both roundings cut off may add up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from moetune.domain.kernel_format import Scales

if TYPE_CHECKING:
    from moetune.domain.compilation import CompileTask

RELATIVE_ERROR = {"bf16": 5e-3, "fp16": 7e-4, "fp8e4nv": 5e-3, "i8": 5e-3}
"""Type of the operands to the largest relative error; the output is fp16 for fp16, else bf16."""

_TWICE = {("fp8e4nv", Scales.TENSOR), ("fp8e4nv", Scales.CHANNEL)}


def relative_error_limit(operand_type: str, scales: Scales) -> float:
    """The largest relative error of a format."""
    twice = scales is Scales.GROUP or (operand_type, scales) in _TWICE
    return RELATIVE_ERROR[operand_type] * (2 if twice else 1)


def sum_factor(topk: int) -> float:
    """How much larger the error gets where the kernel adds topk results in the output's type; 0: no sum."""
    return math.sqrt(1 + (topk + 1) / 2) if topk else 1.0


def tolerance_of(task: CompileTask) -> float:
    """The largest relative error of a binary."""
    return relative_error_limit(task.operand_type, task.scales) * sum_factor(task.launch.sum_topk)
