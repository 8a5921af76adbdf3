"""Where the routed experts stand among a checkpoint's modules, and which lists of modules name them.

A quantization config leaves modules out (`ignore`, `modules_to_not_convert`, `exclude_modules`, ...)
or gives some a scheme of their own (`targets`, `quantized_layers`). Only what that means for the
routed experts matters here.

How the servers match, sglang 0.5.23 wheel: quantization/utils.py:_module_path_match and
is_layer_skipped (parts of a dotted path), quantization/modelopt_quant.py:is_layer_excluded (globs),
quantization/compressed_tensors/utils.py:check_equal_or_regex_match (whole name, dotted suffix or
`re:`; never a prefix).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.domain.module_patterns import PatternError, glob_matches, regex_matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# What may stand before `layers.3`: by architecture and by who wrote the list.
_PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "backbone.",
    "transformer.",
    "",
)
_LEAVES = (".0.gate_proj", ".0.up_proj", ".0.down_proj", ".0.w1", ".gate_up_proj")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})(?![\d\[])", re.A)
_MAX_EXPRESSIONS = 512
# A list may hold thousands of patterns; those with digits that do not name their layer are tried on
# every layer only up to here, on three of them above.
_MANY_PATTERNS = 32


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The routed experts among the modules.

    Attributes:
        container: their module below a layer: `mlp.experts`, `block_sparse_moe.experts`, ...
        layers: numbers of the layers that have experts, empty when unknown.
    """

    container: str = "mlp.experts"
    layers: tuple[int, ...] = ()

    def named_by_paths(self, entries: Sequence[str]) -> frozenset[int] | None:
        """Layers whose experts a list of paths and globs names; None: all of them.

        A path names the experts when it is them, holds them, lies in them, or stands as whole parts
        inside their path; a glob when it matches their path, one part of it, or one of their leaves.
        """
        plain = {entry.rstrip(".") for entry in entries if "*" not in entry and "?" not in entry}
        inside = {
            entry[: at + len(self.container)]
            for entry in plain
            if (at := f".{entry}.".find(f".{self.container}.")) >= 0
        }
        globs = [entry for entry in entries if "*" in entry or "?" in entry]

        def by_path(path: str) -> bool:
            return path in inside or not plain.isdisjoint(_runs(path))

        named = {layer for layer in self._layers() if any(by_path(p) for p in self._paths(layer))}
        names = {layer: self._names(layer) for layer in self._layers()}
        for glob, layers in self._with_layers(globs, exact=False):
            literals = re.split(r"[*?]+", glob)
            named |= self._spread(glob, {n for n in layers if _glob_names(glob, literals, names[n])})
        return self._answer(named)

    def named_by_targets(self, entries: Sequence[str]) -> frozenset[int] | None:
        """Layers whose experts a compressed-tensors list names; None: all of them.

        Raises:
            PatternError: for a regular expression that cannot be read and that speaks of experts.
        """
        plain = {entry for entry in entries if not entry.startswith("re:")}
        patterns = list({entry[3:]: None for entry in entries if entry.startswith("re:")})
        if len(patterns) > _MAX_EXPRESSIONS:
            raise PatternError(f"a list of {len(patterns)} regular expressions")
        named = {
            layer
            for layer in self._layers()
            if any(not plain.isdisjoint(_suffixes(name)) for name in self._leaves(layer))
        }
        for pattern, layers in self._with_layers(patterns, exact=True):
            named |= self._spread(pattern, {n for n in layers if self._leaf_matches(pattern, n)})
        return self._answer(named)

    def owns(self, name: str) -> bool:
        """Whether a module's name lies in (or is) the routed experts of some layer."""
        head, _, tail = f".{name}.".partition(f".{self.container}.")
        return (bool(tail) or name.endswith(self.container)) and _LAYER.search(head) is not None

    def _leaf_matches(self, pattern: str, layer: int) -> bool:
        try:
            return any(regex_matches(pattern, leaf) for leaf in self._leaves(layer))
        except PatternError:
            if "expert" in pattern or "mlp" in pattern:
                raise
            return False

    def _layers(self) -> tuple[int, ...]:
        # A number that no list names, when the layers are unknown: only general entries count then.
        return self.layers or (999_999,)

    def _answer(self, named: set[int]) -> frozenset[int] | None:
        return None if named >= set(self._layers()) else frozenset(named)

    def _paths(self, layer: int) -> Iterator[str]:
        return (f"{prefix}layers.{layer}.{self.container}" for prefix in _PREFIXES)

    def _leaves(self, layer: int) -> Iterator[str]:
        return (path + leaf for path in self._paths(layer) for leaf in _LEAVES)

    def _spread(self, pattern: str, matched: set[int]) -> set[int]:
        """The layers that a match stands for: all of them for a pattern that cannot tell them apart."""
        if matched and not any(character.isdigit() for character in pattern):
            return set(self._layers())
        return matched

    def _names(self, layer: int) -> str:
        """All that a glob may match to name a layer's experts: paths, parts of them, leaves; one a line."""
        paths = list(self._paths(layer))
        parts = dict.fromkeys(part for path in paths for part in path.split("."))
        return "\n".join((*paths, *parts, *(path + leaf for path in paths for leaf in _LEAVES)))

    def _with_layers(self, patterns: Sequence[str], *, exact: bool) -> Iterator[tuple[str, Iterable[int]]]:
        """Each pattern with the layers to try it on.

        A pattern without digits cannot tell layers apart and is tried on one, so that long lists stay
        cheap; `_spread` makes that one stand for all. A glob `layers.1*` names layer 1 and 1x too; in
        a regular expression (`exact`) a number followed by a point is that number.
        """
        known = self._layers()
        some = known
        if len(patterns) > _MANY_PATTERNS:
            some = tuple(dict.fromkeys((known[0], known[len(known) // 2], known[-1])))
        for pattern in dict.fromkeys(patterns):
            plain = pattern.replace("\\", "")
            number = _LAYER.search(plain)
            if number is not None and not exact:
                yield pattern, [n for n in known if str(n).startswith(number.group(1))]
            elif number is not None and plain[number.end() :][:1] == "." and "|" not in plain:
                yield pattern, [n for n in known if n == int(number.group(1))]
            elif any(character.isdigit() for character in pattern):
                yield pattern, some
            else:
                yield pattern, known[:1]


def _glob_names(glob: str, literals: Sequence[str], names: str) -> bool:
    # What stands between the wildcards must occur: this settles nearly every glob of a long list.
    if not all(literal in names for literal in literals):
        return False
    return any(glob_matches(glob, name) for name in names.split("\n"))


def _runs(path: str) -> Iterator[str]:
    """Every run of whole parts of a dotted path."""
    parts = path.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))


def _suffixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[i:]) for i in range(len(parts)))
