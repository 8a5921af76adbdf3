"""Made-up operands of the grouped GEMM in every format, quantized as a server would, and their meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from moetune.domain.kernel_format import Scales
from moetune.measure.reference import dequantize, dequantize_blocks, dequantize_groups

if TYPE_CHECKING:
    from moetune.domain.kernel_format import KernelFormat

TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8e4nv": torch.float8_e4m3fn,
    "i8": torch.int8,
    "u8": torch.uint8,
}
"""Triton's names of types."""

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest number of a type that activations are quantized to."""

_INT8_UNIT = 1 / 64
"""What an integer stands for, so that products are of the size of those of floats."""
_STATIC_SCALE = 1 / 64
_ROWS_AT_A_TIME = 1 << 14


@dataclass(frozen=True, slots=True)
class Operand:
    """Values and, where they are quantized, scales and zero points.

    Attributes:
        values: `[R, K]` activations or `[E, N, K]` weights, as they lie in memory.
        scales: for activations `[R, groups]`, or `[1, 1]` for all of them; for weights `[E, ...]`.
        zeros: zero points of weights.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None

    def rows(self, count: int) -> Operand:
        """The first rows."""
        return self.picked(slice(count))

    def picked(self, rows: torch.Tensor | slice) -> Operand:
        """Some rows of activations, or some experts of weights."""
        shared = self.scales is None or self.scales.shape[0] < self.values.shape[0]
        scales = self.scales if shared or self.scales is None else self.scales[rows]
        return Operand(self.values[rows], scales, None if self.zeros is None else self.zeros[rows])

    def copied(self) -> Operand:
        """The same in memory of its own."""
        scales, zeros = (None if part is None else part.clone() for part in (self.scales, self.zeros))
        return replace(self, values=self.values.clone(), scales=scales, zeros=zeros)


class OperandMaker:
    """Makes the operands of one format.

    Args:
        kind: the format.
        device: where.
        generator: of the numbers.
    """

    def __init__(self, kind: KernelFormat, device: torch.device, generator: torch.Generator) -> None:
        self.kind, self._device, self._generator = kind, device, generator
        self.output = TYPES[kind.output_type]
        self._operand = TYPES[kind.operand_type]
        self._weight = TYPES[kind.weight_type]
        self._static_scale = torch.full((1, 1), _STATIC_SCALE, device=device)

    def normal(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Normal numbers of half a unit; as integers of the size that stands for that."""
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)
        made.normal_(0.0, 0.5, generator=self._generator)
        if dtype is torch.int8:
            return (made / _INT8_UNIT).round().clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
        return made.to(dtype)

    def weights(self, experts: int, n: int, k: int) -> Operand:
        """`[E, N, K]` weights with scales between a half and one and a half."""
        if self.kind.scales is Scales.GROUP:
            return self._grouped_weights(experts, n, k)
        values = torch.empty(experts, n, k, dtype=self._weight, device=self._device)
        for expert in range(experts):  # one at a time: fp8 is made from something larger
            values[expert] = self.normal(n, k, self._weight)
        block_n, block_k = self.kind.block_shape
        shapes = {
            Scales.BLOCK: (experts, -(-n // block_n), -(-k // block_k)) if block_k else (),
            Scales.CHANNEL: (experts, n, 1),
            Scales.TENSOR: (experts, 1, 1),
        }
        shape = shapes.get(self.kind.scales)
        return Operand(values, None if shape is None else self._scales(shape, self._unit(self._weight)))

    def activations(self, rows: int, k: int) -> Operand:
        """`[R, K]` activations."""
        values = torch.empty(rows, k, dtype=self._operand, device=self._device)
        for start in range(0, rows, _ROWS_AT_A_TIME):
            part = values[start : start + _ROWS_AT_A_TIME]
            part.copy_(self.normal(part.shape[0], k, self._operand))
        if not self.kind.quantizes_activations:
            return Operand(values)
        shapes = {
            Scales.BLOCK: (rows, self._groups(k)),
            Scales.CHANNEL: (rows, 1),
            Scales.TENSOR: (1, 1),
        }
        return Operand(values, self._scales(shapes[self.kind.scales], self._unit(self._operand)))

    def quantized(self, values: torch.Tensor) -> Operand:
        """Activations in the type of the operands, with scales as a server computes them in each call."""
        if not self.kind.quantizes_activations:
            return Operand(values.to(self._operand))
        rows, columns = values.shape
        largest = LARGEST[self._operand]
        if self.kind.scales is Scales.BLOCK:
            groups, size = self._groups(columns), self.kind.block_shape[1]
            padded = torch.nn.functional.pad(values.float(), (0, groups * size - columns))
            grouped = padded.view(rows, groups, size)
        else:
            grouped = values.float().view(rows, 1, columns)
        if self.kind.static_activation:
            scales = self._static_scale
        elif self.kind.scales is Scales.TENSOR:
            scales = (grouped.abs().amax().clamp_min(1e-10) / largest).view(1, 1)
        else:
            scales = grouped.abs().amax(2).clamp_min(1e-10) / largest
        units = grouped / scales[:, :, None]
        if self._operand is torch.int8:
            units = units.round()
        made = units.clamp(-largest, largest).to(self._operand).view(rows, -1)[:, :columns]
        return Operand(made.contiguous(), scales)

    def meaning_of_weights(self, weights: Operand) -> torch.Tensor:
        """The numbers that weights stand for, in fp32."""
        if weights.scales is None:
            return weights.values.float()
        if self.kind.scales is Scales.GROUP:
            return dequantize_groups(
                weights.values,
                weights.scales,
                weights.zeros,
                bits=self.kind.weight_bits,
                group_size=self.kind.group_size,
            )
        if self.kind.scales is Scales.BLOCK:
            return dequantize_blocks(weights.values, weights.scales, self.kind.block_shape)
        return dequantize(weights.values, weights.scales)

    def meaning_of_activations(self, x: Operand) -> torch.Tensor:
        """The numbers that activations stand for, in fp32."""
        if x.scales is None:
            return x.values.float()
        if self.kind.scales is Scales.BLOCK:
            return dequantize_blocks(x.values, x.scales, (1, self.kind.block_shape[1]))
        return dequantize(x.values, x.scales)

    def _grouped_weights(self, experts: int, n: int, k: int) -> Operand:
        bits, groups = self.kind.weight_bits, -(-k // self.kind.group_size)
        per_byte = 8 // bits
        scales = self._scales((experts, n, groups), 1 / (1 << bits)).to(self.output)
        zeros = self._bytes(experts, -(-n // per_byte), groups) if self.kind.zero_point else None
        return Operand(self._bytes(experts, n, -(-k // per_byte)), scales, zeros)

    def _bytes(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=self._device, generator=self._generator)

    def _scales(self, shape: tuple[int, ...], unit: float) -> torch.Tensor:
        return (torch.rand(shape, generator=self._generator, device=self._device) + 0.5) * unit

    def _groups(self, k: int) -> int:
        return -(-k // self.kind.block_shape[1]) if self.kind.block_shape[1] else 1

    @staticmethod
    def _unit(dtype: torch.dtype) -> float:
        return _INT8_UNIT if dtype is torch.int8 else 1.0
