"""A whole attention layer of each kind, from the outputs of its projections to the input of its
output projection: equal to the formulas, however requests are split into steps."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from dsv4_ops.attention import KINDS, AttentionLayer, LayerInputs, LayerSpec, attention_layer
from dsv4_ops.attention.metadata import BlockTables, build_decode_metadata, build_prefill_metadata
from dsv4_ops.attention.step import StateTables, attention_step, build_attention_step
from tests.helpers import Called, assert_exact, i32
from tests.support import layers
from tests.support.layers import LENGTH, PLAIN, SPEC, Engine, SmallLayer, changed, in_chunks, oracle
from tests.support.sampled import sampled

MIXED = replace(PLAIN, indexer_layout="v4_indexer_fp8")
each_kind = pytest.mark.parametrize("kind", KINDS)
precisions = [(PLAIN, 3e-6), (SPEC, 0.01)]
each_precision = pytest.mark.parametrize(("spec", "budget"), precisions, ids=["plain", "fp8"])
LAYERS: dict[Any, tuple[SmallLayer, list[dict[str, Tensor]], list[Tensor]]] = {}


def layer_of(kind: str, spec: LayerSpec) -> tuple[SmallLayer, list[dict[str, Tensor]]]:
    return in_one_pass(kind, spec)[:2]


def in_one_pass(
    kind: str, spec: LayerSpec
) -> tuple[SmallLayer, list[dict[str, Tensor]], list[Tensor]]:
    """Return a layer, inputs of four requests, and the output of each in a step of its own."""
    if (kind, spec) not in LAYERS:
        layer = SmallLayer(kind, spec)
        inputs = layers.projected(layer, layers.hidden_states())
        alone = [in_chunks(layer, [rows], [[LENGTH]])[0] for rows in inputs]
        LAYERS[kind, spec] = layer, inputs, alone
    return LAYERS[kind, spec]


def assert_close(actual: Tensor, expected: Tensor, budget: float) -> None:
    """Assert that a row's error is at most ``budget`` times its amax. In bf16, the
    budget is twice the error of rounded results and weights, and of codes that may change."""
    error = (actual.double() - expected.double()).abs().amax((1, 2))
    amax = expected.double().abs().amax((1, 2))
    assert amax.min() > 0.1
    assert (error <= budget * amax).all(), float((error / amax).max())


@each_kind
@pytest.mark.parametrize(
    ("spec", "budget"),
    [(PLAIN, 3e-6), (MIXED, 3e-6), (SPEC, 0.01)],
    ids=["plain", "plain keys", "fp8"],
)
def test_a_layer_is_what_the_formulas_say(kind: str, spec: LayerSpec, budget: float) -> None:
    layer, inputs, outputs = in_one_pass(kind, spec)
    for rows, out in zip(inputs[:2], outputs[:2], strict=True):
        want = oracle(layer, rows)
        sure = want.margin > 1e-3  # at smaller margins, rounding may change the selection
        assert int(sure.sum()) >= 0.9 * LENGTH
        assert_close(out[sure], want.out[sure], budget)


@each_kind
def test_the_formulas_tell_layouts_apart(kind: str) -> None:
    """With another layout or another selection, the result would exceed the budget."""
    layer, inputs, (_, out, *_) = in_one_pass(kind, SPEC)
    layer.spec = PLAIN
    plain = oracle(layer, inputs[1]).out
    layer.spec = replace(SPEC, attention=replace(SPEC.attention, index_topk=5))
    fewer = oracle(layer, inputs[1]).out
    layer.spec = SPEC
    with pytest.raises(AssertionError):
        assert_close(out, plain, 0.01)
    if kind == "c4":
        with pytest.raises(AssertionError):
            assert_close(out, fewer, 0.01)


@st.composite
def cuts(draw: Any) -> dict[str, Any]:
    """Sample how many tokens each of up to four requests adds per step: decodes, speculative
    tokens, chunks that end anywhere, and none."""
    counts = st.sampled_from([0, 1, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33])
    requests = draw(st.lists(st.lists(counts, max_size=6), min_size=1, max_size=4))
    for request in requests:
        while sum(request) > LENGTH:
            request.pop()
    if not any(map(sum, requests)):
        requests[0] = [1]
    padding, seed = draw(st.sampled_from([0, 0, 1, 5])), draw(st.integers(0, 9))
    return {"cuts": requests, "padding": padding, "seed": seed}


@each_kind
@each_precision
def test_any_cut_into_steps_gives_the_same(kind: str, spec: LayerSpec, budget: float) -> None:
    """Steps are decodes, prefills, chunks and mixtures; requests reuse blocks."""
    layer, inputs, whole = in_one_pass(kind, spec)

    @sampled(*(30, 10) if spec is PLAIN else (12, 4))
    @given(cuts())
    def compare(how: dict[str, Any]) -> None:
        outputs = in_chunks(layer, inputs[: len(how["cuts"])], **how)
        for out, expected in zip(outputs, whole, strict=False):
            if len(out):
                assert_close(out, expected[: len(out)], budget)

    compare()


@each_kind
@each_precision
@pytest.mark.parametrize("cuts", [[[LENGTH]] * 3, [[30, 5, 1, 9], [2, 20, 23], [1, 44]]])
def test_the_schedule_of_prefills_changes_only_rounding(
    kind: str, spec: LayerSpec, budget: float, cuts: list[list[int]]
) -> None:
    layer, inputs, whole = in_one_pass(kind, spec)
    with changed(layer, schedule="prefill"):
        outputs = in_chunks(layer, inputs[:3], cuts)
    for out, expected in zip(outputs, whole, strict=False):
        assert_close(out, expected[: len(out)], budget)


CUTS = [[9, 1, 1, 17, 3, 1], [1, 1, 20, 1, 0, 4], [16, 4, 0, 1, 1, 1]]


@each_kind
def test_where_pages_lie_changes_no_bit(kind: str) -> None:
    layer, inputs = layer_of(kind, SPEC)
    assert_exact(*(in_chunks(layer, inputs[:3], CUTS, seed=seed) for seed in (1, 2)))


@each_kind
def test_a_batch_invariant_request_has_the_same_bits_in_any_company(kind: str) -> None:
    layer, inputs = layer_of(kind, replace(SPEC, batch_invariant=True))
    (alone,) = in_chunks(layer, inputs[:1], CUTS[:1])
    crowded = in_chunks(layer, [*inputs[1:3], inputs[0]], [*CUTS[1:], CUTS[0]], seed=3)
    assert torch.equal(alone, crowded[2])


@each_kind
def test_scales_of_a_quantised_output(kind: str) -> None:
    """Codes times scales give the bf16 output."""
    layer, inputs, whole = in_one_pass(kind, SPEC)
    layer.spec = replace(SPEC, scale_layout="row")
    layers.poison(layer)
    engine = Engine(layer, 1)
    quantised = layer.attend(inputs[0], *engine.batch([LENGTH]))
    layer.spec = SPEC
    values = quantised.values.float().unflatten(-1, (-1, 128)) * quantised.scales[..., None]
    found = values.flatten(-2).transpose(0, 1)
    torch.testing.assert_close(found, whole[0].float(), rtol=2**-4, atol=1e-3)


def test_a_step_is_the_same_from_metadata() -> None:
    layer, _ = layer_of("c4", SPEC)
    starts, lens, slots, swa, rows, states = Engine(layer).batch([3, 1, 0, 9], 2)
    tables, held = BlockTables(swa=swa, c4=rows, c128=rows), StateTables(c4=states, c128=states)
    step = build_attention_step(SPEC, starts, lens, slots, tables, held)
    decode = build_decode_metadata(SPEC.attention, starts, lens, slots, tables)
    prefill = build_prefill_metadata(SPEC.attention, starts, lens, slots, tables, max_chunks=4)
    for metadata in (decode, prefill):
        again = attention_step(SPEC, metadata, slots, tables, held)
        assert_exact(leaves(again), leaves(step))
    assert len(leaves(step)) == 17


def test_invalid_tokens_write_nothing_and_see_nothing() -> None:
    """A mask excludes tokens whatever their slots are; without it, a slot of -1 does."""
    layer, _ = layer_of("c4", SPEC)
    starts, lens, slots, swa, rows, states = Engine(layer).batch([3, 1, 0, 9], 2)
    tables, held = BlockTables(swa=swa, c4=rows, c128=rows), StateTables(c4=states, c128=states)
    valid = torch.arange(len(slots)) % 3 != 1
    batch = (starts, lens, slots, tables)
    step = build_attention_step(SPEC, *batch, held, valid)
    for name in ("req_indices", "positions", "slot_mapping"):
        assert getattr(step, name)[~valid].tolist() == [-1] * int((~valid).sum())
    assert not step.swa_lens[~valid].any()
    for group in (step.c4, step.c128):
        assert not group.lens[~valid].any()
        assert bool((group.slot_mapping[~valid] == -1).all())
        assert bool((group.state_slot_mapping[~valid] == -1).all())
    without_slots = (starts, lens, torch.where(valid, slots, -1), tables, held)
    for again in (None, valid):
        found = build_attention_step(SPEC, *without_slots, again)
        assert_exact(leaves(found), leaves(step))
    whole = build_attention_step(SPEC, *batch, held)
    assert torch.equal(step.slot_mapping[valid], slots[valid])
    assert step.is_valid_token is not None
    assert torch.equal(step.is_valid_token, valid & whole.is_valid_token)
    decode = build_decode_metadata(SPEC.attention, *batch, valid)
    again = attention_step(SPEC, decode, slots, tables, held)
    assert_exact(leaves(again), leaves(step))


@pytest.mark.parametrize("kind", ["c4", "c128"])
@pytest.mark.parametrize("rings", [False, True])
def test_states_of_rings_are_saved_when_the_windows_were_read(kind: str, rings: bool) -> None:
    """With ``state_rings`` one op reads states and another saves them, without it one does both."""
    layer, inputs, whole = in_one_pass(kind, PLAIN)
    with changed(layer, state_rings=rings), Called() as called:
        (out,) = in_chunks(layer, inputs[:1], [[5, 0, 1, 1, 30, LENGTH - 37]])
    torch.testing.assert_close(out, whole[0], rtol=0, atol=3e-6)
    compressor = {"save_and_compress", "compress_and_insert", "save_compressor_states"}
    names = [name for name in called.names if name in compressor]
    of_step = ["compress_and_insert", "save_compressor_states"] if rings else ["save_and_compress"]
    assert names == of_step * (6 * (2 if kind == "c4" else 1))


def test_state_rings_must_be_a_bool() -> None:
    layer, inputs = layer_of("c128", PLAIN)
    refused = pytest.raises(TypeError, match="attention_layer: state_rings must be a bool, got int")
    with changed(layer, state_rings=1), refused:
        in_chunks(layer, inputs[:1], [[5]])


def leaves(tree: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(tree)


def test_states_of_a_token_go_where_its_window_key_goes() -> None:
    """A token with slot -1 is in no cache, and attends only if a mask says that it is valid.
    The numbers are by hand, for blocks of 4 and 8 rows."""
    table = i32([[7, 3, 5]])
    batch = (
        SPEC,
        i32([0, 3]),
        i32([9]),
        torch.tensor([12, -1, 30]),
        BlockTables(swa=table, c4=table, c128=table),
        StateTables(c4=table, c128=i32([[2, 4]])),
    )
    padded = build_attention_step(*batch)
    assert padded.positions.tolist() == [6, -1, 8]
    assert padded.c4.lens.tolist() == [1, 0, 2]
    assert padded.swa_lens.tolist() == [7, 0, 8]  # the window is 8 tokens
    step = build_attention_step(*batch, torch.ones(3, dtype=torch.bool))
    assert step.positions.tolist() == [6, 7, 8]
    assert step.c4.state_slot_mapping.tolist() == [3 * 4 + 2, -1, 5 * 4]
    assert step.c128.state_slot_mapping.tolist() == [2 * 8 + 6, -1, 4 * 8]
    assert step.c4.slot_mapping.tolist() == [-1, -1, -1]
    assert step.c4.lens.tolist() == [1, 2, 2]


def test_the_schedule_of_prefills_needs_the_pages_of_the_window() -> None:
    layer, inputs = layer_of("window", SPEC)
    step = layer.step(*Engine(layer, 1).batch([LENGTH]))
    given = (LayerInputs(**inputs[0]), layer.attention.weights, layer.attention.caches)
    without = replace(step, swa_block_table=None)
    with pytest.raises(TypeError, match=r"step\.swa_block_table must be a tensor, got NoneType"):
        attention_layer(SPEC, "window", *given, without, schedule="prefill")
    with pytest.raises(ValueError, match="schedule must be 'decode' or 'prefill', got 'both'"):
        attention_layer(SPEC, "window", *given, step, schedule="both")


WRONG = {
    "kind": ("kind must be 'window' or 'c4' or 'c128', got 'c8'", {}),
    "q": ("inputs.q must be torch.bfloat16, got torch.float32", {"q": lambda q: q.float()}),
    "kv": ("inputs.kv must have shape .*num_tokens", {"kv": lambda kv: kv[1:]}),
    "kv_score": ("inputs.kv_score must be a tensor, got NoneType", {"kv_score": lambda _: None}),
    "indexer_q": ("inputs.indexer_q must have shape", {"indexer_q": lambda q: q[..., :64]}),
    "indexer_weights": ("inputs.indexer_weights must have shape .*num_index_heads",
     {"indexer_weights": lambda weights: weights[:, 1:]}),
    "ape": ("weights.ape must have shape", {"ape": lambda ape: ape[1:]}),
    "indexer_norm_weight": ("weights.indexer_norm_weight must be a tensor",
     {"indexer_norm_weight": lambda _: None}),
    "attn_sink": ("weights.attn_sink must have shape", {"attn_sink": lambda sink: sink[1:]}),
    "states": ("caches.states must have shape", {"states": lambda states: states[:, 16:]}),
    "indexer": ("caches.indexer must be a tensor, got NoneType", {"indexer": lambda _: None}),
    "positions": ("step.positions must have shape", {"positions": lambda tokens: tokens[1:]}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_anything_is_written(name: str) -> None:
    message, changes = WRONG[name]
    layer, inputs = layer_of("c4", SPEC)
    layers.poison(layer)
    step = layer.step(*Engine(layer, 1).batch([LENGTH]))
    given = [LayerInputs(**inputs[0]), layer.attention.weights, layer.attention.caches, step]
    spoiled = []
    for held in given:
        names = {field.name for field in fields(held)} & set(changes)
        new = {key: changes[key](getattr(held, key)) for key in names}
        spoiled.append(replace(held, **new))
    refused = pytest.raises((ValueError, TypeError), match=f"attention_layer: {message}")
    with layers.unwritten(layer), refused:
        attention_layer(SPEC, "c8" if name == "kind" else "c4", *spoiled)


def test_specs_of_the_released_models() -> None:
    flash, pro = LayerSpec.deepseek_v4_flash(), LayerSpec.deepseek_v4_pro(batch_invariant=True)
    assert (flash.num_groups, flash.attention.index_topk, flash.batch_invariant) == (8, 512, False)
    assert (pro.num_groups, pro.attention.index_topk, pro.batch_invariant) == (16, 1024, True)
    shapes = {name: layout.shape(3) for name, layout in flash.layouts("c4").items()}
    assert shapes == {
        "swa": (3, 37440),
        "compressed": (3, 37440),
        "states": (3, 8208),
        "indexer": (3, 8640),
        "indexer_states": (3, 2160),
    }
    shapes = {name: layout.shape(3) for name, layout in pro.layouts("c128").items()}
    assert shapes == {"swa": (3, 37440), "compressed": (3, 1728), "states": (3, 8208)}
    assert set(flash.layouts("window")) == {"swa"}
    plain, scaled = flash.rope_table("window", 9), flash.rope_table("c128", 9)
    assert plain[1, 1] == pytest.approx(torch.tensor(10000 ** (-1 / 32)).cos().item())
    assert scaled[1, 31] == pytest.approx(torch.tensor(160000 ** (-31 / 32) / 16).cos().item())
    assert scaled[1, 33] == pytest.approx(torch.tensor(160000 ** (-1 / 32)).sin().item())


def test_a_module_keeps_its_parameters_and_not_its_caches() -> None:
    layer, _ = layer_of("c4", SPEC)
    names = ["ape", "attn_sink", "indexer_ape", "indexer_norm_weight", "norm_weight"]
    assert sorted(layer.attention.state_dict()) == names
    again = SmallLayer("c4", SPEC).attention
    again.load_state_dict(layer.attention.state_dict())
    assert isinstance(again, AttentionLayer)
    assert again.extra_repr() == "c4, num_heads=4"
    assert again.caches.indexer is again.indexer_cache
    assert layers.HIDDEN == 128
