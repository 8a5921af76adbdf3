"""How far a kernel's result may lie from the fp32 reference, by the type of its operands.

Relative error of the whole result: norm of the difference over norm of the reference. The inputs are
the same rounded values for both, so what is left is the rounding of the output and the order of an
fp32 sum. A bf16 has 8 bits: rounded to nearest that is 1.7e-3, cut off, as Triton's interpreter does,
3.4e-3. An fp16 has 11 bits: an eighth of it. The sums of fp8 products, which Hopper's tensor cores keep
in fewer than 32 bits within one tile, stay below the rounding of the output.
"""

from __future__ import annotations

RELATIVE_ERROR = {"bf16": 5e-3, "fp16": 7e-4, "fp8e4nv": 5e-3}
"""Type of the operands to the largest relative error; the output is fp16 for fp16, else bf16."""
