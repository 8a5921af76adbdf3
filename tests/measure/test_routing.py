"""Routings: every token to different experts, as skewed as is asked for, other ranks' experts elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moetune.domain.errors import InputError
from moetune.domain.synthetic_routing import skew_of
from moetune.measure.alignment import ELSEWHERE, align
from moetune.measure.routing import draw
from tests.applications.fake_machine import PROBLEM


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("skew", [0.0, 1.2])
def test_a_token_goes_to_different_experts(skew: float) -> None:
    ids = draw(PROBLEM, 500, skew, generator())
    assert ids.shape == (500, 8)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < 256


def test_uniform_is_uniform_and_zipf_is_skewed() -> None:
    tokens = 8000
    counts = torch.bincount(draw(PROBLEM, tokens, 0.0, generator()).flatten(), minlength=256)
    assert counts.min() > 0.7 * tokens * 8 / 256
    skewed = torch.bincount(draw(PROBLEM, tokens, 1.2, generator()).flatten(), minlength=256)
    ordered = skewed.sort(descending=True).values
    # Without replacement the most popular is in nearly every token.
    assert ordered[0] > 0.8 * tokens
    assert ordered[:26].sum() > 0.6 * tokens * 8
    # Which one it is, is drawn too.
    firsts = {int(torch.bincount(draw(PROBLEM, 200, 1.2, generator(s)).flatten()).argmax()) for s in range(6)}
    assert len(firsts) > 3


def test_equal_seeds_are_equal_routings_and_others_are_not() -> None:
    assert torch.equal(draw(PROBLEM, 20, 0.0, generator(3)), draw(PROBLEM, 20, 0.0, generator(3)))
    assert not torch.equal(draw(PROBLEM, 20, 0.0, generator(3)), draw(PROBLEM, 20, 0.0, generator(4)))


def test_experts_of_other_ranks_are_elsewhere() -> None:
    problem = replace(PROBLEM, E=64, ep=4)
    ids = draw(problem, 1000, 0.0, generator())
    here = ids[ids != ELSEWHERE]
    assert here.max() < 64
    assert 0.2 < here.numel() / ids.numel() < 0.3


def test_fused_shared_experts_take_every_token() -> None:
    problem = replace(PROBLEM, E=257, topk=9, fused_shared_experts=1)
    ids = draw(problem, 50, 0.0, generator())
    assert ids.shape == (50, 9)
    assert (ids[:, -1] == 256).all()
    assert ids[:, :-1].max() < 256


@pytest.mark.parametrize(
    "text", ["", "zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:99", "uniform:1", "recorded:x"]
)
def test_what_is_no_routing_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        skew_of(text)


def test_the_words_of_routings() -> None:
    assert skew_of("uniform") == 0.0
    assert skew_of("zipf:1.2") == 1.2


def test_an_alignment_of_given_length_holds_every_slot_once() -> None:
    ids = draw(replace(PROBLEM, E=64, ep=4), 100, 0.0, generator())
    plain, longer = align(ids, 64, 16), align(ids, 64, 16, length=align(ids, 64, 16).padded_length + 20)
    for alignment in (plain, longer):
        slots = alignment.slot_ids[alignment.slot_ids < ids.numel()]
        assert sorted(slots.tolist()) == list(range(ids.numel()))
        used = int(alignment.used_length)
        for tile, expert in enumerate(alignment.tile_experts.tolist()):
            rows = alignment.slot_ids[tile * 16 : (tile + 1) * 16]
            experts = {int(ids.flatten()[slot]) for slot in rows.tolist() if slot < ids.numel()}
            assert experts <= {expert}
            assert tile * 16 < used or not experts
    assert longer.padded_length == plain.padded_length + 20
