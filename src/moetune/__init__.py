"""moetune: tuned configs for the fused-MoE Triton kernels of SGLang and vLLM."""

__version__ = "0.1.0"
