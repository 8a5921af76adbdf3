"""From a checkpoint's config.json to its expert layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from moetune.domain.quantization import Dtype, Quantization


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The Mixture-of-Experts layer of a checkpoint, whole: before any sharding.

    Attributes:
        model: the name or path it was asked for by.
        architecture: first entry of `architectures` (the parent's for a nested config).
        model_type: the checkpoint's `model_type`, empty when absent.
        num_experts: routed experts of one layer.
        topk: routed experts a token goes to.
        hidden_size: columns of the residual stream.
        latent_size: columns that enter the experts where the model has a latent projection.
        intermediate_size: columns between up and down of one routed expert.
        num_shared_experts: experts that every token goes to.
        shared_intermediate_size: columns of the shared experts together, None without.
        gated: the up kernel writes gate and up (2N) rather than N columns.
        bias: the experts have biases.
        activation_dtype: bf16, fp16 or fp32: the type of the hidden states.
        quantization: of the routed experts.
        num_moe_layers: layers that have experts, None when unknown.
        source: where it was read: `packaged`, a path, or a hub id.
        provenance: field name to where the value came from, for the user to check.
    """

    model: str
    architecture: str
    num_experts: int
    topk: int
    hidden_size: int
    intermediate_size: int
    model_type: str = ""
    latent_size: int | None = None
    num_shared_experts: int = 0
    shared_intermediate_size: int | None = None
    gated: bool = True
    bias: bool = False
    activation_dtype: Dtype = Dtype.BF16
    quantization: Quantization = field(default_factory=Quantization)
    num_moe_layers: int | None = None
    source: str = ""
    provenance: tuple[tuple[str, str], ...] = ()
