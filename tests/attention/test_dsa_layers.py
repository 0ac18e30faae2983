"""``dsa_layer``: layers with and without an indexer, padding, and errors.

transformers/test_deepseek_v32.py tests that layers select and attend as Hugging Face's do."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4_ops import attention
from dsv4_ops.attention import ContextParallel, DsaCache, DsaSpec, IndexerInputs, build_mla_step
from tests.helpers import i32

HEADS, NOPE, ROPE, RANK, VALUE, TOKENS = 2, 4, 4, 8, 4, 7
SPEC = DsaSpec(
    num_heads=HEADS, softmax_scale=0.5, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
    v_head_dim=VALUE, kv_lora_rank=RANK, block_size=4, dtype=torch.float32, index_topk=3,
    index_heads=2, indexer_layout="plain",
)  # fmt: skip


def sampled(rows, *shape, seed=0, dtype=torch.float32):
    """Return the first ``rows`` of 600 random rows; other calls return the same first rows."""
    return torch.randn(600, *shape, generator=torch.Generator().manual_seed(seed))[:rows].to(dtype)


def call_of(spec, num_tokens=TOKENS, padding=0, **changed):
    """Return a prefill of one request, in blocks 2 and 0, and its caches of three blocks."""
    rows, dtype, dim = num_tokens + padding, spec.dtype, NOPE + spec.qk_rope_head_dim
    batch = i32([0, num_tokens]), i32([num_tokens]), i32([[2, 0]])
    step = build_mla_step(spec, *batch, num_tokens=rows)
    arguments = {
        "inputs": attention.MlaInputs(sampled(rows, HEADS, dim, seed=1, dtype=dtype),
         sampled(rows, spec.kv_lora_rank, seed=2, dtype=dtype),
         sampled(rows, spec.qk_rope_head_dim, seed=3, dtype=dtype)),
        "weights": attention.MlaWeights(sampled(8, spec.qk_rope_head_dim, seed=4),
         sampled(HEADS, NOPE, spec.kv_lora_rank, seed=5, dtype=dtype),
         sampled(HEADS, spec.kv_lora_rank, VALUE, seed=6, dtype=dtype)),
        "cache": DsaCache.allocate(spec, 3),
        "step": step,
        "indexer": IndexerInputs(sampled(rows, 2, 128, seed=7, dtype=dtype),
         sampled(rows, 128, seed=8, dtype=dtype), sampled(rows, 2, seed=9)),
    }  # fmt: skip
    return partial(attention.dsa_layer, spec, **{**arguments, **changed}), arguments["cache"]


FP8 = {"layout": "mla_ds_fp8", "indexer_layout": "v4_indexer_fp8", "dtype": torch.bfloat16}
ROWS_656 = replace(SPEC, kv_lora_rank=512, qk_rope_head_dim=64, **FP8)


@pytest.mark.parametrize("spec", [SPEC, ROWS_656], ids=["plain", "FP8"])
def test_padding_writes_and_selects_nothing(spec):
    """A token selects ``index_topk`` rows that it sees, or all of them if it sees fewer."""
    call, cache = call_of(spec, padding=2)
    out, slots = call()
    assert out.dtype == spec.dtype
    assert out[TOKENS:].count_nonzero() == 0
    assert (slots[TOKENS:] == -1).all()
    slot_of = [8, 9, 10, 11, 0, 1, 2]  # slots of the positions, in blocks 2 and 0 of four rows
    for token in range(TOKENS):
        chosen = [slot for slot in slots[token].tolist() if slot >= 0]
        seen = slot_of[: token + 1]
        assert set(chosen) <= set(seen)
        assert len(chosen) == min(spec.index_topk, len(seen))
    assert cache.kv[1].count_nonzero() == 0  # no request has this block
    assert cache.indexer[1].count_nonzero() == 0
    assert cache.kv[2].flatten(1).any(1).all()
    assert cache.kv[0].flatten(1).any(1).tolist() == [True, True, True, False]
    again, _ = call_of(spec)[0]()
    assert torch.equal(out[:TOKENS], again)


def test_a_layer_without_an_indexer_attends_to_the_slots_it_is_given():
    """The result is that of a layer with an indexer, and the cache has no indexer keys."""
    selected, _ = call_of(SPEC)
    want = selected()
    cache = DsaCache.allocate(SPEC, 3, selects=False)
    assert cache.indexer is None
    shared, _ = call_of(SPEC, cache=cache, indexer=None, slots=want.slots)
    assert torch.equal(shared().out, want.out)
    others, _ = call_of(SPEC, indexer=None, slots=want.slots.roll(1, 0))
    assert not torch.equal(others().out, want.out)


def test_expanded_keys_of_a_first_chunk_are_all_rows():
    """The layer writes the same rows and keys, and returns no slots."""
    spec = replace(SPEC, index_topk=TOKENS)
    want, cache = call_of(spec, padding=1)
    want = want()
    expands = replace(spec, context="chunked", max_chunks=0, max_decode_tokens=0)
    call, mine = call_of(expands, padding=1)
    weights = call.keywords["weights"]
    up = torch.cat((weights.w_uk_t.mT, weights.w_uv), 2).transpose(0, 1)  # latent, head, values
    weights = replace(weights, w_kv_b=up.flatten(1).T.contiguous())
    keys = IndexerInputs(None, call.keywords["indexer"].k)
    for given in (keys, call.keywords["indexer"]):
        found = call(weights=weights, indexer=given)
        torch.testing.assert_close(found.out, want.out)
        assert found.slots is None
        assert torch.equal(mine.kv, cache.kv)
        assert torch.equal(mine.indexer, cache.indexer)


def test_backward_is_refused():
    call, _ = call_of(SPEC)
    inputs = replace(call.keywords["inputs"], kv_c=sampled(TOKENS, RANK).requires_grad_())
    out = call(inputs=inputs).out.sum()
    with pytest.raises(NotImplementedError, match=r"^dsa_layer: results must not be differentiat"):
        out.backward()


def test_wrong_calls_are_refused_before_anything_is_written():
    call, cache = call_of(SPEC)
    indexer, slots = call.keywords["indexer"], torch.zeros(TOKENS, 3, dtype=torch.int32)
    expanded = replace(SPEC, context="chunked", workspace_rows=4)
    chunked = build_mla_step(expanded, i32([0, 7]), i32([7]), i32([[2, 0]]), num_tokens=TOKENS)
    weights = replace(call.keywords["weights"], w_kv_b=sampled(HEADS * (NOPE + VALUE), RANK))
    for changed, message in (
        ({"slots": slots}, "slots must be given to a layer without an indexer, .* got both"),
        ({"indexer": None}, "slots must be given to a layer without an indexer, .* got neither"),
        ({"indexer": None, "slots": slots[:, :2]}, r"slots must have shape \[.*, 3\], got"),
        ({"indexer": None, "slots": slots.long()}, "slots must be torch.int32"),
        ({"indexer": replace(indexer, k=indexer.k[:, :64])},
         r"indexer.k must have shape \[.*, 128\], got"),
        ({"indexer": replace(indexer, q=indexer.q.bfloat16())},
         "indexer.q must be torch.float32, got torch.bfloat16"),
        ({"indexer": replace(indexer, weights=indexer.weights[:, :1])},
         r"indexer.weights must have shape \[.*, 2\], got"),
        ({"cache": replace(cache, indexer=None)},
         "cache.indexer must be a tensor, got NoneType"),
        ({"step": chunked, "weights": weights},
         "step must have the context 'absorbed', or no chunks, got expanded contexts"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=f"^dsa_layer: {message}"):
            call(**changed)
        assert not cache.kv.any()
        assert not cache.indexer.any()


RANKS = ContextParallel(group="0", world_size=2, shards_index_heads=True)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"index_topk": 0}, ValueError, "index_topk must be at least 1, got 0"),
        ({"index_heads": 0}, ValueError, "index_heads must be at least 1, got 0"),
        ({"qk_rope_head_dim": 130}, ValueError, "qk_rope_head_dim must be at most the 128 values"),
        ({"layout": "mla_fp8", "qk_rope_head_dim": 8}, ValueError, "layout must be 'plain' or 'ml"),
        ({"indexer_layout": "v4_fp8"}, ValueError, "indexer_layout must be 'v4_indexer_fp8' or"),
        ({"interleaved": 1}, TypeError, "interleaved must be a bool"),
        ({"parallel": RANKS}, NotImplementedError, "parallel.shards_index_heads must be False"),
    ],
)
def test_errors_of_a_spec(changed, error, message):
    with pytest.raises(error, match=f"^DsaSpec: {message}"):
        replace(SPEC, **changed)


def test_a_library_runs_the_ops_that_it_has():
    """``impl="flash_mla"`` is for selected rows of the released sizes; caches with at most
    ``index_topk`` rows run our dense kernels."""
    spec = DsaSpec(num_heads=128, softmax_scale=1.0, layout="mla_ds_fp8")
    assert replace(spec, impl="flash_mla").dense == spec
    wide = replace(spec, v_head_dim=256, qk_nope_head_dim=192, context="chunked")
    assert (spec.expands, wide.expands) == (True, False)
    wide.check_impl("patch", 1, "triton")
    for heads, index_heads, impl in ((16, 64, "flash_mla"), (128, 16, "deep_gemm")):
        other = replace(spec, num_heads=heads, index_heads=index_heads)
        with pytest.raises(NotImplementedError, match=r"^patch: impl must be .* with 16 heads"):
            other.check_impl("patch", 1, impl)
