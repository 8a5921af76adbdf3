"""vLLM: file names, lookup, defaults, sharding, config files and launches of its fused-MoE Triton kernel."""

from moetune.servers.vllm.server import VLLM, open_vllm

__all__ = ["VLLM", "open_vllm"]
