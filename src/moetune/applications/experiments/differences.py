"""In what the starts of an experiment differ: facts by name, as texts that can be shown."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from moetune.applications.experiments.facts import ARGUMENTS_FROM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from moetune.domain.experiment import ConfigRead, ServerFacts

KV_TOLERANCE = 0.01
"""Share by which the tokens of the KV cache may differ between two starts of the same command.

Both servers size the cache from the memory that is free once weights and activations are there, so it
moves by some pages from start to start, and no flag asks for that. A flag that costs memory moves it by
far more than a hundredth, and a load that fits in neither is another matter (completed < requested)."""

UNKNOWN = "not said"

_SHOWN = 120
_LEAD = 24
_NESTED = ("{", "[", "(", "<")


def differences(one: Sequence[ServerFacts], two: Sequence[ServerFacts]) -> Iterator[tuple[str, str, str]]:
    """`(what, value of one, value of two)` for each fact in which two groups of starts differ.

    The groups stand for themselves by their first start, of which the others do not differ; the KV
    cache by its median.
    """
    first, second = one[0], two[0]
    for name, read in _FACTS.items():
        ours, theirs = read(first), read(second)
        # What a start does not tell is no difference where another start learns it by the way.
        if ours != theirs and not (name in _TOLD_BY_THE_WAY and UNKNOWN in (ours, theirs)):
            yield name, ours, theirs
    yield from _kv_tokens(one, two)
    yield from _configs(first.configs, second.configs)
    yield from _arguments(first, second)
    yield from _maps(
        "other ", _without(first.other, ARGUMENTS_FROM, "log"), _without(second.other, ARGUMENTS_FROM, "log")
    )


def disagreements(starts: Sequence[ServerFacts]) -> Iterator[tuple[str, str, str]]:
    """In what the starts of one arm differ among themselves."""
    seen: set[str] = set()
    for other in starts[1:]:
        for what, ours, theirs in differences(starts[:1], (other,)):
            if what not in seen:
                seen.add(what)
                yield what, ours, theirs


def _graphs(phase: str, sizes: tuple[int, ...], facts: ServerFacts) -> str:
    off = dict(facts.graphs_off).get(phase)
    if sizes and off is None:
        return f"{len(sizes)} sizes up to {max(sizes)}: {', '.join(map(str, sizes))}"[:_SHOWN]
    if sizes:
        return f"{len(sizes)} sizes up to {max(sizes)}, and: {off}"[: 2 * _SHOWN]
    return f"off: {off}" if off is not None else UNKNOWN


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


_FACTS: Mapping[str, Callable[[ServerFacts], str]] = {
    "server": lambda facts: facts.server,
    "version": lambda facts: facts.version or UNKNOWN,
    "triton_version": lambda facts: facts.triton_version or UNKNOWN,
    "gpus": lambda facts: ", ".join(facts.gpus) or UNKNOWN,
    "runner": lambda facts: facts.runner or UNKNOWN,
    "max_running_requests": lambda facts: _number(facts.max_running_requests),
    "prefill_chunk": lambda facts: _number(facts.prefill_chunk),
    "decode_graphs": lambda facts: _graphs("decode", facts.decode_graphs, facts),
    "prefill_graphs": lambda facts: _graphs("prefill", facts.prefill_graphs, facts),
    "all_reduce_fusion": lambda facts: facts.all_reduce_fusion[0] or UNKNOWN,
}
# Read from the names of config files, or said by some releases only when something is chosen.
_TOLD_BY_THE_WAY = frozenset({"version", "triton_version", "gpus", "runner"})


def _kv_tokens(one: Sequence[ServerFacts], two: Sequence[ServerFacts]) -> Iterator[tuple[str, str, str]]:
    ours = [facts.kv_tokens for facts in one if facts.kv_tokens is not None]
    theirs = [facts.kv_tokens for facts in two if facts.kv_tokens is not None]
    if not ours and not theirs:
        return
    if not ours or not theirs:
        yield "kv_tokens", _number(ours[0] if ours else None), _number(theirs[0] if theirs else None)
        return
    first, second = median(ours), median(theirs)
    if abs(first - second) > KV_TOLERANCE * max(first, second):
        yield "kv_tokens", f"{first:.0f}", f"{second:.0f}"


def _configs(one: Sequence[ConfigRead], two: Sequence[ConfigRead]) -> Iterator[tuple[str, str, str]]:
    yield from _maps("config ", _by_file(one), _by_file(two))


def _by_file(configs: Sequence[ConfigRead]) -> dict[str, str]:
    """File to what its lookup ended with; ranks that ended differently stand side by side."""
    found: dict[str, set[str]] = {}
    for config in configs:
        name = config.file or "files"
        folder = config.path.rpartition("/")[0]
        found.setdefault(name, set()).add(f"{config.outcome} in {folder}" if folder else config.outcome)
    return {name: ", ".join(sorted(outcomes)) for name, outcomes in found.items()}


def _arguments(one: ServerFacts, two: ServerFacts) -> Iterator[tuple[str, str, str]]:
    ours, theirs = one.arguments, two.arguments
    if one.other.get(ARGUMENTS_FROM) != two.other.get(ARGUMENTS_FROM):
        # An endpoint prints nested values in another way than a log, and knows other names.
        common = {
            name
            for name in ours.keys() & theirs.keys()
            if not (ours[name].startswith(_NESTED) or theirs[name].startswith(_NESTED))
        }
        ours = {name: ours[name] for name in common}
        theirs = {name: theirs[name] for name in common}
    yield from _maps("argument ", ours, theirs)


def _maps(label: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in sorted(ours.keys() | theirs.keys()):
        first, second = ours.get(name, UNKNOWN), theirs.get(name, UNKNOWN)
        if first != second:
            yield f"{label}{name}", *_where_they_differ(first, second)


def _without(values: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in names}


def _where_they_differ(one: str, two: str) -> tuple[str, str]:
    """Long values from shortly before the first character in which they differ."""
    if max(len(one), len(two)) <= _SHOWN:
        return one, two
    place = next((i for i, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]), None)
    start = max(0, (min(len(one), len(two)) if place is None else place) - _LEAD)
    return _piece(one, start), _piece(two, start)


def _piece(text: str, start: int) -> str:
    piece = text[start : start + _SHOWN]
    return f"{'…' if start else ''}{piece}{'…' if start + _SHOWN < len(text) else ''}"
