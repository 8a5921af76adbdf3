"""Patterns that name modules in quantization configs, matched in bounded time.

compressed-tensors writes `re:` before regular expressions, ModelOpt and Quark write globs. They come
out of strangers' files, so none of them reaches `re`: a pattern is parsed into a small tree and
evaluated on sets of positions, which needs no backtracking, and a budget of steps bounds the rest.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from functools import lru_cache

_MAX_PATTERN = 1024
_MAX_NESTING = 16
_MAX_STEPS = 100_000
_SETS = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
    "s": frozenset(string.whitespace),
}


class PatternError(ValueError):
    """A regular expression that is broken, or of a kind that is not read here."""


@dataclass(frozen=True, slots=True)
class _Characters:
    members: frozenset[str]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    branches: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Ahead:
    part: _Node
    negated: bool


@dataclass(frozen=True, slots=True)
class _Edge:
    end: bool


_Node = _Characters | _Sequence | _Either | _Repeat | _Ahead | _Edge
_ANY = _Characters(frozenset("\n"), negated=True)


def regex_matches(pattern: str, text: str) -> bool:
    """Whether a regular expression matches at the start of a text, as `re.match` would say.

    Raises:
        PatternError: for a pattern that is broken, too long or too costly, or that uses what a
            module name never needs (back references, look-behind, flags).
    """
    return _Matcher(_parsed(pattern), text).matches()


def glob_matches(pattern: str, text: str) -> bool:
    """Whether a glob with `*` and `?` matches a whole text."""
    position = star = 0
    resume: int | None = None
    for_pattern = 0
    while position < len(text):
        here = pattern[for_pattern] if for_pattern < len(pattern) else ""
        if here == "*":
            star, resume = for_pattern, position
            for_pattern += 1
        elif here in ("?", text[position]) and here:
            for_pattern += 1
            position += 1
        elif resume is not None:
            resume += 1
            position, for_pattern = resume, star + 1
        else:
            return False
    return not pattern[for_pattern:].strip("*")


@lru_cache(maxsize=256)
def _parsed(pattern: str) -> _Node:
    return _Parser(pattern).parse()


@dataclass(slots=True)
class _Parser:
    text: str
    at: int = 0
    depth: int = 0

    def parse(self) -> _Node:
        if len(self.text) > _MAX_PATTERN:
            raise PatternError(f"a pattern of {len(self.text)} characters")
        node = self._either()
        if self.at < len(self.text):
            raise PatternError("an unbalanced parenthesis")
        return node

    def _next(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _take(self, token: str) -> bool:
        if token and self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False

    def _either(self) -> _Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Either(tuple(branches))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._next() and self._next() not in "|)":
            parts.append(self._quantified(self._atom()))
        return _Sequence(tuple(parts))

    def _quantified(self, node: _Node) -> _Node:
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        here = self._next()
        if here in bounds and here:
            self.at += 1
            least, most = bounds[here]
        elif here == "{":
            close = self.text.find("}", self.at)
            least_text, comma, most_text = self.text[self.at + 1 : max(close, 0)].partition(",")
            if close < 0 or not all(t.isdecimal() and len(t) < 4 for t in (least_text, most_text or "0")):
                raise PatternError("a brace that is no repeat")
            self.at = close + 1
            least = int(least_text)
            most = int(most_text) if most_text else (None if comma else least)
        else:
            return node
        self._take("?")  # greedy or not: the same answer
        if self._next() and self._next() in "*+?{":
            raise PatternError("a repeat of a repeat")
        return _Repeat(node, least, most)

    def _atom(self) -> _Node:
        here = self._next()
        self.at += 1
        if here == "(":
            return self._group()
        if here == "[":
            return self._class()
        if here == "\\":
            return self._escape()
        if here in "*+?{":
            raise PatternError("a repeat of nothing")
        special: dict[str, _Node] = {".": _ANY, "^": _Edge(end=False), "$": _Edge(end=True)}
        return special.get(here, _Characters(frozenset(here)))

    def _group(self) -> _Node:
        self.depth += 1
        if self.depth > _MAX_NESTING:
            raise PatternError("groups nested too deep")
        ahead: bool | None = None
        if self._take("?"):
            if self._take("="):
                ahead = False
            elif self._take("!"):
                ahead = True
            elif not self._take(":"):
                raise PatternError("a group of a kind that is not read here")
        node = self._either()
        if not self._take(")"):
            raise PatternError("an unbalanced parenthesis")
        self.depth -= 1
        return node if ahead is None else _Ahead(node, negated=ahead)

    def _escape(self) -> _Characters:
        here = self._next()
        self.at += 1
        if here.lower() in _SETS and here:
            return _Characters(_SETS[here.lower()], negated=here.isupper())
        if not here or here.isalnum():
            raise PatternError(f"the escape \\{here}")
        return _Characters(frozenset(here))

    def _class(self) -> _Characters:
        negated = self._take("^")
        members: set[str] = set()
        first = True
        while first or self._next() != "]":
            here = self._next()
            self.at += 1
            first = False
            if not here:
                raise PatternError("an unbalanced bracket")
            if here == "\\":
                escaped = self._escape()
                if escaped.negated:
                    raise PatternError("a negated escape in a class")
                members |= escaped.members
            elif self._next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
                last = self.text[self.at + 1]
                if not (here.isascii() and last.isascii() and here <= last):
                    raise PatternError("a range that is none")
                members |= {chr(code) for code in range(ord(here), ord(last) + 1)}
                self.at += 2
            else:
                members.add(here)
        self.at += 1
        return _Characters(frozenset(members), negated)


@dataclass(slots=True)
class _Matcher:
    node: _Node
    text: str
    steps: int = field(default=0)

    def matches(self) -> bool:
        return bool(self._ends(self.node, frozenset({0})))

    def _ends(self, node: _Node, starts: frozenset[int]) -> frozenset[int]:
        """Every position at which a match of the node that began at one of the starts can end."""
        self.steps += 1 + len(starts)
        if self.steps > _MAX_STEPS:
            raise PatternError("a pattern that takes too many steps")
        if isinstance(node, _Characters):
            text = self.text
            return frozenset(
                s + 1 for s in starts if s < len(text) and (text[s] in node.members) != node.negated
            )
        if isinstance(node, _Sequence):
            for part in node.parts:
                starts = self._ends(part, starts)
                if not starts:
                    break
            return starts
        if isinstance(node, _Either):
            return frozenset().union(*(self._ends(branch, starts) for branch in node.branches))
        if isinstance(node, _Ahead):
            return frozenset(s for s in starts if bool(self._ends(node.part, frozenset({s}))) != node.negated)
        if isinstance(node, _Edge):
            return starts & {len(self.text) if node.end else 0}
        return self._repeated(node, starts)

    def _repeated(self, node: _Repeat, starts: frozenset[int]) -> frozenset[int]:
        for _ in range(node.least):
            starts = self._ends(node.part, starts)
        reached = fresh = starts
        rounds = 0
        while fresh and (node.most is None or rounds < node.most - node.least):
            fresh = self._ends(node.part, fresh) - reached
            reached |= fresh
            rounds += 1
        return reached
