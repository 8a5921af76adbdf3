"""Balance, skew and blocks of a recording, held to naive counting and to laws that are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.features import expected_blocks
from moetune.domain.recording import (
    NOWHERE,
    IdArray,
    RecordedLayer,
    Recording,
    check_ids,
    join_calls,
)
from moetune.domain.routing_statistics import (
    balance,
    count_blocks,
    fewest_tokens,
    fit_exponent,
    layer_statistics,
    rank_balance,
    uniform_variation,
    variation,
)
from moetune.domain.synthetic_routing import draw_ids, law_name, skew_of, synthetic_recording

EXPERTS = 12


@st.composite
def routings(draw: st.DrawFn, *, nowhere: bool = False) -> IdArray:
    tokens, topk = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    least = NOWHERE if nowhere else 0
    rows = st.lists(st.integers(least, EXPERTS - 1), min_size=topk, max_size=topk)
    return np.array(draw(st.lists(rows, min_size=tokens, max_size=tokens)), dtype=np.int32)


def layer_of(ids: IdArray, number: int = 0) -> RecordedLayer:
    return RecordedLayer(number, ids, (len(ids),))


@given(routings(nowhere=True))
def test_loads_are_what_counting_gives(ids: IdArray) -> None:
    loads = layer_of(ids).loads(EXPERTS)
    assert loads.tolist() == [sum(expert == value for value in ids.ravel()) for expert in range(EXPERTS)]


@given(routings(nowhere=True), st.integers(1, 20), st.sampled_from([1, 3, 16]))
def test_blocks_are_what_counting_gives(ids: IdArray, m: int, block_m: int) -> None:
    m = min(m, len(ids))
    (found,) = count_blocks(layer_of(ids), EXPERTS, m, [block_m])
    windows = min(32, len(ids) // m)
    starts = [int(start) for start in np.linspace(0, len(ids) - m, windows)]
    expected = [
        sum(math.ceil(int((ids[start : start + m] == expert).sum()) / block_m) for expert in range(EXPERTS))
        for start in starts
    ]
    assert found == pytest.approx(sum(expected) / windows)


@given(routings())
def test_numbers_have_their_ranges(ids: IdArray) -> None:
    found = layer_statistics(layer_of(ids), EXPERTS, ids.shape[1], ms=(1,), ranks=3)
    assert found.balance >= 1 / EXPERTS - 1e-4
    assert found.balance <= 1
    assert found.rank_balance is not None
    assert 1 / 3 - 1e-4 <= found.rank_balance <= 1
    assert found.slots == ids.size
    assert found.never_hit == EXPERTS - len(np.unique(ids))
    assert found.busiest >= 1
    assert found.exponent is None or 0 <= found.exponent <= 8


@given(routings(), st.permutations(range(EXPERTS)))
def test_names_of_experts_do_not_matter(ids: IdArray, names: list[int]) -> None:
    renamed = np.array(names, dtype=np.int32)[ids]
    one, other = (
        layer_statistics(layer_of(each), EXPERTS, each.shape[1], ms=(1, 4)) for each in (ids, renamed)
    )
    assert one.balance == pytest.approx(other.balance)
    assert one.variation == pytest.approx(other.variation)
    assert one.exponent == pytest.approx(other.exponent)
    assert [b.blocks for b in one.blocks] == pytest.approx([b.blocks for b in other.blocks])


def test_balance_is_sglangs_utilization() -> None:
    """(mean + 1e-5) / (max + 1e-5), which makes an idle layer even."""
    assert balance(np.array([4, 4, 4, 4])) == 1.0
    assert balance(np.array([8, 0, 0, 0])) == pytest.approx((2 + 1e-5) / (8 + 1e-5))
    assert balance(np.zeros(4)) == 1.0


def test_the_balance_of_ranks_is_a_mean_over_calls_and_passes_over_idle_ones() -> None:
    calls = np.array([[1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 0, 0]])
    assert rank_balance(calls, 2) == pytest.approx((1.0 + 0.5) / 2, abs=1e-4)
    assert rank_balance(np.zeros((2, 4), dtype=np.int64), 2) == 1.0


def test_variation_is_that_over_the_mean() -> None:
    assert variation(np.array([3, 3, 3])) == 0.0
    assert variation(np.array([0, 6])) == pytest.approx(1.0)
    assert variation(np.zeros(3, dtype=np.int64)) == 0.0


@pytest.mark.parametrize(("experts", "topk"), [(128, 8), (64, 6), (8, 2), (32, 1)])
@pytest.mark.parametrize("skew", [0.0, 0.5, 0.8, 1.2, 2.0])
def test_a_known_skew_is_found_again(experts: int, topk: int, skew: float) -> None:
    ids = draw_ids(8192, experts, topk, skew, np.random.default_rng([experts, int(skew * 10)]))
    found = layer_statistics(layer_of(ids), experts, topk, ms=())
    assert found.exponent == pytest.approx(skew, abs=0.06)


def test_few_uniform_tokens_are_not_taken_for_skewed_ones() -> None:
    """64 tokens of 256 experts vary by 70% for chance alone."""
    found = []
    for seed in range(12):
        ids = draw_ids(64, 256, 8, 0.0, np.random.default_rng(seed))
        assert variation(layer_of(ids).loads(256)) > 0.55
        found.append(fit_exponent(layer_of(ids).loads(256), 64, 8))
    assert np.mean(found) < 0.12


def test_chance_of_uniform_routing_is_that_of_draws() -> None:
    seen = [
        variation(layer_of(draw_ids(256, 64, 4, 0.0, np.random.default_rng(seed))).loads(64))
        for seed in range(40)
    ]
    assert np.mean(seen) == pytest.approx(uniform_variation(256, 4 / 64), rel=0.03)


def test_uniform_draws_cost_what_is_expected_of_uniform_routing() -> None:
    ids = draw_ids(1 << 14, 64, 4, 0.0, np.random.default_rng(1))
    found = layer_statistics(layer_of(ids), 64, 4, ms=(16, 64, 512), block_ms=(16, 64))
    for blocks in found.blocks:
        assert blocks.uniform == pytest.approx(64 * expected_blocks(blocks.m, 4 / 64, blocks.block_m))
        assert blocks.ratio == pytest.approx(1.0, abs=0.03)


def test_skew_saves_weights_in_decode_and_costs_blocks_in_prefill() -> None:
    ids = draw_ids(1 << 14, 256, 8, 1.2, np.random.default_rng(2))
    ratios = {
        (blocks.m, blocks.block_m): blocks.ratio
        for blocks in layer_statistics(layer_of(ids), 256, 8, ms=(16, 1024), block_ms=(64,)).blocks
    }
    assert ratios[16, 64] < 0.7
    assert ratios[1024, 64] > 1.15


def test_calls_that_were_not_recorded_are_left_out() -> None:
    ids = draw_ids(100, 16, 2, 0.0, np.random.default_rng(3))
    assert {blocks.m for blocks in layer_statistics(layer_of(ids), 16, 2, ms=(64, 128)).blocks} == {64}


def test_counts_have_no_tokens_no_blocks_and_a_skew_only_with_topk() -> None:
    ids = draw_ids(4096, 64, 4, 0.8, np.random.default_rng(4))
    counted = RecordedLayer(3, counts=layer_of(ids).loads(64)[None])
    unknown = layer_statistics(counted, 64, None)
    assert (unknown.tokens, unknown.blocks, unknown.exponent, unknown.uniform_variation) == (
        None,
        (),
        None,
        None,
    )
    assert unknown.balance == layer_statistics(layer_of(ids), 64, 4).balance
    known = layer_statistics(counted, 64, 4)
    assert known.exponent == pytest.approx(0.8, abs=0.06)
    assert known.tokens is None
    assert fewest_tokens(Recording("stat", 64, True, (counted,))) is None


@given(st.integers(1, 4).map(lambda power: 2**power), st.data())
def test_ranks_share_out_all_slots(ranks: int, data: st.DataObject) -> None:
    """What the ranks see is a partition: each slot is somebody's, under a number of its rank."""
    experts = 16
    ids = data.draw(routings()) % experts
    recording = Recording("topk_ids", experts, True, (layer_of(ids),))
    seen = [recording.on_rank(ranks, rank) for rank in range(ranks)]
    loads = np.concatenate([part.layers[0].loads(experts // ranks) for part in seen])
    assert loads.tolist() == recording.layers[0].loads(experts).tolist()
    for part in seen:
        assert part.experts == experts // ranks
        assert part.layers[0].ids is not None
        assert part.layers[0].ids.shape == ids.shape


def test_a_rank_keeps_its_stretch_of_the_numbers() -> None:
    """As sglang 0.5.23's StandardDispatcher.dispatch makes its local_expert_mapping."""
    ids = np.array([[0, 5, 7], [4, 3, 1]], dtype=np.int32)
    recording = Recording("topk_ids", 8, True, (layer_of(ids),))
    seen = recording.on_rank(2, 1).layers[0].ids
    assert seen is not None
    assert seen.tolist() == [[-1, 1, 3], [0, -1, -1]]


@pytest.mark.parametrize(("ranks", "rank"), [(3, 0), (2, 2), (2, -1), (0, 0)])
def test_a_rank_that_is_none_is_refused(ranks: int, rank: int) -> None:
    recording = Recording("topk_ids", 8, True, (layer_of(np.zeros((1, 1), dtype=np.int32)),))
    with pytest.raises(InputError):
        recording.on_rank(ranks, rank)


def test_a_rank_expects_its_share_of_uniform_blocks() -> None:
    ids = draw_ids(1 << 13, 64, 4, 0.0, np.random.default_rng(5))
    part = Recording("topk_ids", 64, True, (layer_of(ids),)).on_rank(4, 2)
    found = layer_statistics(part.layers[0], 16, 4, global_experts=64, ms=(256,), block_ms=(16,))
    assert found.blocks[0].ratio == pytest.approx(1.0, abs=0.04)
    assert found.exponent is None, "a part of the experts says nothing of the whole law"


def test_what_was_not_written_is_left_out() -> None:
    """A recorder with 8 columns, a padded token, a dense layer."""
    ids = np.full((3, 8), NOWHERE, dtype=np.int32)
    ids[0, :2], ids[2, :2] = (1, 2), (3, 0)
    layer = join_calls(5, [ids, np.full((4, 8), NOWHERE, dtype=np.int32), ids[:1]])
    assert layer is not None
    assert layer.ids is not None
    assert layer.ids.tolist() == [[1, 2], [3, 0], [1, 2]]
    assert layer.calls == (2, 1)
    assert join_calls(0, [np.full((4, 8), NOWHERE, dtype=np.int32)]) is None


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    topk = draw(st.integers(1, 3))
    layers = []
    for number in sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=4))):
        calls = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
        rows = st.lists(st.integers(NOWHERE, EXPERTS - 1), min_size=topk, max_size=topk)
        total = sum(calls)
        ids = np.array(draw(st.lists(rows, min_size=total, max_size=total)), dtype=np.int32)
        layers.append(RecordedLayer(number, ids, tuple(calls)))
    return Recording("topk_ids", EXPERTS, draw(st.booleans()), tuple(layers))


@settings(max_examples=60)
@given(recordings())
def test_a_recording_comes_back_as_it_was(recording: Recording) -> None:
    data = recording.to_bytes()
    back = Recording.from_bytes(data, "kept")
    assert back.routing == recording.routing
    assert back.to_bytes() == data
    assert (back.experts, back.experts_known) == (recording.experts, recording.experts_known)
    assert [layer.calls for layer in back.layers] == [layer.calls for layer in recording.layers]


@settings(max_examples=80)
@given(recordings(), st.data())
def test_damage_of_a_kept_recording_is_an_error_or_another_name(recording: Recording, data: Any) -> None:
    content = bytearray(recording.to_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        back = Recording.from_bytes(bytes(content), "kept")
    except InputError:
        return
    same = [layer.number for layer in back.layers] == [layer.number for layer in recording.layers]
    assert back.routing != recording.routing or (same and back.layers[0].calls == recording.layers[0].calls)


def test_a_pickle_is_never_read_back(tmp_path: Any) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "written"), "w"))

    path = tmp_path / "evil.npz"
    np.savez(
        path, ids=np.array([Evil()], dtype=object), layers=[0], calls_of_layer=[1], calls=[1], experts=[1, 1]
    )
    with pytest.raises(InputError, match="no recording"):
        Recording.from_bytes(path.read_bytes(), "evil")
    assert not (tmp_path / "written").exists()


def test_one_other_expert_is_another_recording() -> None:
    ids = draw_ids(50, 16, 2, 0.0, np.random.default_rng(6))
    other = ids.copy()
    other[17, 1] = (other[17, 1] + 1) % 16
    names = {
        Recording("topk_ids", 16, True, (RecordedLayer(number, each, calls),)).routing
        for number in (3, 4)
        for each in (ids, other)
        for calls in ((50,), (20, 30))
    }
    assert len(names) == 8


def test_experts_that_are_none_are_refused() -> None:
    check_ids(np.array([[-1, 3]]), 4)
    for ids, experts in (([[4]], 4), ([[-2]], 4), ([[0]], 0), ([[0]], 1 << 17)):
        with pytest.raises(ValueError, match="expert"):
            check_ids(np.array(ids), experts)


@given(st.integers(1, 60), st.integers(1, 40), st.floats(0, 8), st.data())
def test_tokens_go_to_different_experts(tokens: int, experts: int, skew: float, data: st.DataObject) -> None:
    topk = data.draw(st.integers(1, experts))
    ids = draw_ids(tokens, experts, topk, skew, np.random.default_rng(0))
    assert ids.shape == (tokens, topk)
    assert ids.min() >= 0
    assert ids.max() < experts
    assert all(len(set(row)) == topk for row in ids.tolist())


def test_a_seed_decides_and_layers_differ() -> None:
    one = synthetic_recording([3, 4], 64, 2, 32, 4, 1.2, 7)
    assert one.identifier == synthetic_recording([3, 4], 64, 2, 32, 4, 1.2, 7).identifier
    assert one.identifier != synthetic_recording([3, 4], 64, 2, 32, 4, 1.2, 8).identifier
    # Layers stay what they are when others are made beside them.
    alone = synthetic_recording([4], 64, 2, 32, 4, 1.2, 7)
    assert alone.identifier == replace(one, layers=one.layers[1:]).identifier
    popular = [
        int(layer.loads(32).argmax()) for layer in synthetic_recording(range(8), 64, 2, 32, 4, 2, 0).layers
    ]
    assert len(set(popular)) > 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"experts": 0},
        {"topk": 0},
        {"topk": 33},
        {"tokens": 0},
        {"calls": 0},
        {"layers": []},
        {"layers": [5000]},
        {"tokens": 1 << 22, "calls": 1 << 10},
    ],
)
def test_sizes_that_make_no_recording_are_refused(sizes: dict[str, Any]) -> None:
    usual = {"layers": [1], "tokens": 4, "calls": 1, "experts": 32, "topk": 2, "skew": 0.0, "seed": 0}
    with pytest.raises(InputError):
        synthetic_recording(**{**usual, **sizes})


def test_a_law_has_one_name() -> None:
    assert [law_name(skew_of(text)) for text in ("zipf:1.20", "zipf:0", "uniform", "zipf:.8")] == [
        "zipf:1.2",
        "uniform",
        "uniform",
        "zipf:0.8",
    ]
