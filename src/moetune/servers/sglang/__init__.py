"""SGLang: its file names, lookup, defaults, sharding, launch and runner selection, by release."""

from moetune.servers.sglang.server import SGLang, open_sglang

__all__ = ["SGLang", "open_sglang"]
