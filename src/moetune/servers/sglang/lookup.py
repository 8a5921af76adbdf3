"""SGLang's lookup of a config file: which file it finds, what it prints, and what it dies of.

Source: `get_moe_configs` of `fused_moe_triton_config.py` in the sglang wheels (0.5.1 and before:
`fused_moe.py`). `{root}/configs/triton_X_Y_Z/{name}`; the root is SGLANG_MOE_CONFIG_DIR, which
replaces the package's folder, or that folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.servers.protocol import ConfigTree, Lookup, Outcome
from moetune.servers.sglang.releases import Feature, Rules

if TYPE_CHECKING:
    from moetune.domain.problem import Kernel

_PREFIX = "triton_"
FIXED_FALLBACKS = ("3.4.0", "3.3.1", "3.2.0", "3.1.0")
"""Before 0.5.12 no other directories than these are tried (sglang wheels, `get_moe_configs`)."""
_TUNER = "https://github.com/sgl-project/sglang/tree/main/benchmark/kernels/fused_moe_triton"
_INFO, _WARNING = "INFO", "WARNING"
_IGNORED = "Deterministic inference is enabled, using default MoE kernel config."


def triton_directory(triton_version: str) -> str:
    """`triton_3_6_0` for 3.6.0."""
    return _PREFIX + triton_version.replace(".", "_")


@dataclass(frozen=True, slots=True)
class _Search:
    """How the search for one name ends.

    Attributes:
        exact: path of the file in the running Triton's directory.
        candidates: every path that is tried.
        found: the path that is read, None without.
        triton: the other Triton's version, where the file comes from its directory.
        error: exception type, where the search dies.
    """

    exact: str
    candidates: tuple[str, ...]
    found: str | None = None
    triton: str | None = None
    error: str | None = None


def look_up(
    rules: Rules,
    triton_version: str,
    kernel: Kernel,
    names: tuple[str, str],
    tree: ConfigTree,
    *,
    ignored: bool,
) -> Lookup:
    """What a release finds for one kernel.

    Args:
        rules: the release.
        triton_version: of the running Triton.
        kernel: `up` or `down`.
        names: file names of the up and of the down kernel.
        tree: what the server would see.
        ignored: deterministic inference is on.
    """
    if kernel == "down" and not rules.has(Feature.DOWN_FILE):
        # One lookup serves both kernels, and it prints once.
        up = look_up(rules, triton_version, "up", names, tree, ignored=ignored)
        return replace(up, kernel="down", log_lines=())
    name = names[kernel == "down"]
    search = _search(rules, triton_version, name, tree)
    if ignored and rules.has(Feature.DETERMINISTIC):
        return Lookup(kernel, name, search.candidates, Outcome.IGNORED, log_lines=((_WARNING, _IGNORED),))
    if search.error is not None:
        return Lookup(kernel, name, search.candidates, Outcome.CRASH, error=search.error)
    if search.found is not None:
        outcome = Outcome.STALE if search.triton else Outcome.EXACT
        return Lookup(
            kernel, name, search.candidates, outcome, search.found, log_lines=(_found_line(search),)
        )
    if kernel == "up":
        return Lookup(
            kernel, name, search.candidates, Outcome.DEFAULT, log_lines=(_default_line(search.exact),)
        )
    return _down_without_file(rules, triton_version, names, tree, search)


def _down_without_file(
    rules: Rules, triton_version: str, names: tuple[str, str], tree: ConfigTree, search: _Search
) -> Lookup:
    """The down kernel then runs with the up kernel's config, whatever the release says about it."""
    up = _search(rules, triton_version, names[0], tree)
    if rules.has(Feature.DOWN_REUSES_UP):
        line = _reuse_line(search.exact) if up.found else _default_line(search.exact)
    elif rules.has(Feature.DOWN_LOG):
        line = _down_line(search.exact)
    else:
        line = _default_line(search.exact)
    outcome = Outcome.REUSED_UP if up.found else Outcome.DEFAULT
    return Lookup("down", names[1], search.candidates + up.candidates, outcome, up.found, log_lines=(line,))


def _search(rules: Rules, triton_version: str, name: str, tree: ConfigTree) -> _Search:
    def path(directory: str) -> str:
        return f"{tree.root}/configs/{directory}/{name}"

    here = triton_directory(triton_version)
    exact = path(here)
    error = None
    others: list[str] = []
    try:
        others = [version for version in _fallbacks(rules, tree) if version != triton_version]
    except (FileNotFoundError, ValueError) as death:
        error = type(death).__name__
    candidates = (exact, *(path(triton_directory(version)) for version in others))
    if tree.has(here, name):  # an exact hit is read before anything is listed
        return _Search(exact, candidates, exact)
    if error is not None:
        return _Search(exact, candidates, error=error)
    for version in others:
        directory = triton_directory(version)
        if tree.has(directory, name):
            return _Search(exact, candidates, path(directory), version)
    return _Search(exact, candidates)


def _fallbacks(rules: Rules, tree: ConfigTree) -> list[str]:
    """Versions of the directories that are tried after the exact one, in order."""
    if not rules.has(Feature.FALLBACK_SCAN):
        return list(FIXED_FALLBACKS[0 if rules.has(Feature.FALLBACK_TO_3_4_0) else 1 :])
    if tree.directories is None:
        raise FileNotFoundError
    versions = [
        entry[len(_PREFIX) :].replace("_", ".")
        for entry in sorted(tree.directories)
        if entry.startswith(_PREFIX)
    ]
    # Any entry whose parts are no numbers (a backup, a note) ends the server here.
    return sorted(versions, key=lambda version: tuple(int(part) for part in version.split(".")), reverse=True)


def _found_line(search: _Search) -> tuple[str, str]:
    if search.triton is None:
        return _INFO, f"Using MoE kernel config from {search.found}."
    return _WARNING, (
        f"Config file not found at {search.exact}. Fallback to triton version {search.triton} "
        f"and use MoE kernel config from {search.found}. Performance might be sub-optimal!"
    )


def _default_line(exact: str) -> tuple[str, str]:
    return _WARNING, (
        "Using default MoE kernel config. Performance might be sub-optimal! "
        f"Config file not found at {exact}, you can create them with {_TUNER}"
    )


def _down_line(exact: str) -> tuple[str, str]:
    return _WARNING, (
        "Using MoE kernel config with down_moe=False. Performance might be sub-optimal! "
        f"Config file not found at {exact}, you can create them with {_TUNER}"
    )


def _reuse_line(exact: str) -> tuple[str, str]:
    return _WARNING, (
        f"Down MoE config file not found at {exact}; reusing the tuned "
        "up-projection config without TMA. Performance might be sub-optimal."
    )
