"""vLLM's lookup of a tuned file: the user's folder, then the shipped one, both flat.

Source: `fused_moe.py:get_moe_configs` (paths as in rules.py).
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from moetune.servers.protocol import ConfigTree, Lookup, Outcome, ServerOptions
from moetune.servers.vllm.rules import BATCH_INVARIANT_VARIABLE, Change, has

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moetune.domain.problem import Kernel
    from moetune.domain.version import Release


def is_batch_invariant(release: Release, options: ServerOptions) -> bool:
    """Whether batch-invariant mode is on, which ignores every file."""
    if not has(release, Change.BATCH_INVARIANT):
        return False
    try:
        from_environment = int(options.environment.get(BATCH_INVARIANT_VARIABLE, "0")) != 0
    except ValueError:
        from_environment = False
    return options.deterministic or from_environment


def look_up(
    release: Release, kernel: Kernel, name: str, trees: Sequence[ConfigTree], options: ServerOptions
) -> Lookup:
    """What the lookup of one file name does, given the trees that it reads, first one first."""
    if is_batch_invariant(release, options):
        return Lookup(kernel, name, (), Outcome.IGNORED)
    candidates = tuple(posixpath.join(tree.root, name) for tree in trees)
    for tree, path in zip(trees, candidates, strict=True):
        if tree.has("", name):
            line = ("INFO", f"Using configuration from {path} for MoE layer.")
            return Lookup(kernel, name, candidates, Outcome.EXACT, found=path, log_lines=(line,))
    places = ", ".join(candidates) if has(release, Change.CANDIDATES_JOINED) else str(list(candidates))
    warning = (
        "WARNING",
        f"Using default MoE config. Performance might be sub-optimal! Config file not found at {places}",
    )
    return Lookup(kernel, name, candidates, Outcome.DEFAULT, log_lines=(warning,))
