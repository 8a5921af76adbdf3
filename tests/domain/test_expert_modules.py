"""Lists of modules mean for the routed experts what they mean to SGLang's own functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.expert_modules import ExpertModules
from moetune.domain.module_patterns import PatternError
from tests.wheels import read_member

EXPERTS = ExpertModules(layers=(3, 4, 13))
QUANTIZATION = "sglang/srt/layers/quantization"


@cache
def sglang_function(member: str, *names: str) -> Callable[..., Any]:
    """Functions of the published wheel, executed alone; the last one is returned."""
    module = ast.parse(read_member("sglang", "0.5.23", f"{QUANTIZATION}/{member}"))
    wanted = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in wanted} == set(names)
    namespace: dict[str, Any] = {"re": re, "Iterable": Iterable}
    exec(compile(ast.Module([*wanted], []), member, "exec"), namespace)
    function: Callable[..., Any] = namespace[names[-1]]
    return function


# Parts of names that lists hold, right ones and near misses.
PARTS = [
    "model",
    "layers",
    "3",
    "13",
    "mlp",
    "experts",
    "0",
    "gate_proj",
    "gate",
    "shared_experts",
    "lm_head",
    "up",
]
DOTTED = st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map(".".join)
NEAR = st.sampled_from(
    [
        "model.layers.3.mlp.experts",
        "model.layers.3.mlp",
        "model.layers.3",
        "layers.3.mlp",
        "mlp.experts",
        "model.layers.3.mlp.experts.0.gate_proj",
        "model.layers.3.mlp.gate",
        "model.layers.3.mlp.shared_experts",
        "experts.0.gate_proj",
        "model",
        "mlp.gate",
    ]
)


@settings(max_examples=300)
@given(st.lists(DOTTED | NEAR, min_size=1, max_size=4))
def test_paths_as_sglang_matches_them(entries: list[str]) -> None:
    match = sglang_function("utils.py", "_module_path_match")
    for layer in EXPERTS.layers:
        path = f"model.layers.{layer}.mlp.experts"
        theirs = any(match(entry, path) for entry in entries)
        # is_layer_skipped: an entry that names something inside the experts counts as well.
        theirs = theirs or any(f"{path}." in f"{entry}." for entry in entries if "experts" in entry)
        named = EXPERTS.named_by_paths(entries)
        ours = named is None or layer in named
        # Ours also knows the other prefixes that architectures put before `layers`, so it may say
        # more than theirs, but never less.
        assert ours or not theirs
        if all(entry.startswith("model.") or "layers" not in entry for entry in entries):
            assert ours == theirs


@settings(max_examples=300)
@given(
    st.lists(
        DOTTED
        | NEAR
        | st.sampled_from(
            [
                r"re:.*mlp\..*",
                r"re:.*\.experts\.\d+\.gate_proj$",
                r"re:model\.layers\.1?3\.",
                r"re:model\.layers\.3\.|x\.layers\.4",
                "re:.*attn.*",
            ]
        ),
        min_size=1,
        max_size=4,
    )
)
def test_targets_as_sglang_matches_them(entries: list[str]) -> None:
    match = sglang_function(
        "compressed_tensors/utils.py", "_is_equal_or_regex_match", "check_equal_or_regex_match"
    )
    leaves = ("0.gate_proj", "0.up_proj", "0.down_proj")
    for layer in EXPERTS.layers:
        theirs = any(match(f"model.layers.{layer}.mlp.experts.{leaf}", entries) for leaf in leaves)
        named = EXPERTS.named_by_targets(entries)
        ours = named is None or layer in named
        assert ours or not theirs
        if all(entry.startswith(("model.", "re:")) or "layers" not in entry for entry in entries):
            assert ours == theirs, (layer, entries)


@pytest.mark.parametrize(
    ("glob", "layers"),
    [
        ("*.mlp.experts*", None),
        ("*.experts.*", None),
        ("experts*", None),
        ("model.layers.3*", frozenset({3})),
        ("model.layers.1*", frozenset({13})),
        ("model.layers.1.*", frozenset()),
        ("*.layers.[34].*", frozenset()),
        ("*.shared_experts*", frozenset()),
        ("mtp*", frozenset()),
        ("*.self_attn*", frozenset()),
        ("language_model.model.layers.4.mlp.experts*", frozenset({4})),
    ],
)
def test_globs(glob: str, layers: frozenset[int] | None) -> None:
    assert EXPERTS.named_by_paths([glob]) == layers


@pytest.mark.parametrize(
    ("expression", "layers"),
    [
        (r".*layers\.3\.mlp.*", frozenset({3})),
        (r".*layers\.1?3\.mlp.*", frozenset({3, 13})),
        (r".*layers\.(3|4)\.mlp.*", frozenset({3, 4})),
        (r"model\.layers\.3\.attn|model\.layers\.4\.mlp", frozenset({4})),
        (r".*layers\.\d+\.mlp.*", None),
    ],
)
def test_expressions(expression: str, layers: frozenset[int] | None) -> None:
    assert EXPERTS.named_by_targets([f"re:{expression}"]) == layers


def test_without_known_layers_only_general_entries_count() -> None:
    unknown = ExpertModules()
    assert unknown.named_by_paths(["model.layers.3.mlp.experts"]) == frozenset()
    assert unknown.named_by_paths(["mlp.experts"]) is None
    assert unknown.named_by_targets([r"re:.*\.experts\..*"]) is None


def test_expressions_that_cannot_be_read_matter_only_when_they_speak_of_experts() -> None:
    assert EXPERTS.named_by_targets([r"re:(?<=lm)_head"]) == frozenset()
    with pytest.raises(PatternError):
        EXPERTS.named_by_targets([r"re:(?<=a)\.experts"])


@pytest.mark.timeout(60)
def test_long_lists_stay_cheap() -> None:
    many = ExpertModules(layers=tuple(range(200)))
    globs = [f"*.module_{'x' * (n % 50)}.y*" for n in range(20_000)]
    assert many.named_by_paths(globs) == frozenset()
    plain = [f"model.layers.{n}.self_attn.q_proj" for n in range(200_000)]
    assert many.named_by_paths(plain) == frozenset()
    assert many.named_by_targets([f"re:.*layers.{n}.attn.*" for n in range(500)]) == frozenset()
    with pytest.raises(PatternError, match="5000"):
        many.named_by_targets([f"re:.*layers.{n}.attn.*" for n in range(5000)])


def test_modules_inside_the_experts() -> None:
    assert EXPERTS.owns("model.layers.3.mlp.experts.7.up_proj")
    assert EXPERTS.owns("model.layers.3.mlp.experts")
    assert not EXPERTS.owns("model.layers.3.mlp.shared_experts.up_proj")
    assert not EXPERTS.owns("model.layers.3.mlp")
    assert not EXPERTS.owns("mtp.mlp.experts")
