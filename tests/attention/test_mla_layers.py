"""Dense MLA layers and their step: hand-computed numbers, and plain attention in float64 over
ragged batches of decodes, chunks of prefills and padding."""

import dataclasses
import math
from random import Random

import pytest
import torch

from dsv4_ops import attention
from dsv4_ops.attention import MlaCache, MlaInputs, MlaSpec, MlaWeights, build_mla_step, mla_layer
from dsv4_ops.core.types import TokenMap
from dsv4_ops.ops.mla import mla_insert_kv, split_kv_b_proj
from tests.helpers import i32

F32, F64 = torch.float32, torch.float64
HEADS, NOPE, ROPE, VALUE, RANK, BLOCK = 2, 4, 4, 3, 12, 4
SIZES = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
SIZES |= {"v_head_dim": VALUE, "kv_lora_rank": RANK, "block_size": BLOCK}
SPEC = MlaSpec(**SIZES, softmax_scale=0.5, dtype=F32)
TABLE = [[2, 7], [5, 0], [1, 3], [0, 0]]
BATCH = (i32([0, 1, 3, 6, 6]), i32([5, 4, 8, 0]), i32(TABLE))


def chunked(**changed):
    sizes = {"context": "chunked", "max_decode_tokens": 4, "workspace_rows": 4, "max_chunks": 2}
    return dataclasses.replace(SPEC, **{**sizes, **changed})


def test_the_step_of_a_mixed_batch():
    """Two decodes of one and two tokens, a prefill of three tokens after five, and padding."""
    step = build_mla_step(chunked(next_n=2), *BATCH, num_tokens=7)
    assert step.counts.tolist() == [2, 2, 3, 3]
    assert step.req_indices.tolist() == [0, 1, 1, 2, 2, 2, -1]
    assert step.positions.tolist() == [4, 2, 3, 5, 6, 7, -1]
    assert step.slot_mapping.tolist() == [28, 22, 23, 13, 14, 15, -1]
    assert step.decode_lens.tolist() == [5, 3, 4, 0]
    assert step.decode_req_indices.tolist() == [0, 1, 1, -1]
    assert step.decode_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert step.prefill_start_loc.tolist() == [3, 3, 3, 6, 6]
    assert step.chunks.cu_seq_lens.diff(dim=1).tolist() == [[0, 0, 4, 0], [0, 0, 1, 0]]
    assert step.chunks.num_chunks.tolist() == [2]
    assert step.chunk_slots.tolist() == [[4, 5, 6, 7], [12, -1, -1, -1]]


def test_the_step_of_absorbed_contexts():
    """Every token is a decode over the rows that it sees."""
    step = build_mla_step(SPEC, *BATCH, torch.tensor([True] * 5 + [False, True]), num_tokens=7)
    assert step.slot_mapping.tolist() == [28, 22, 23, 13, 14, -1, -1]
    assert step.decode_lens.tolist() == [5, 3, 4, 6, 7, 0, 0]
    assert step.decode_req_indices.tolist() == [0, 1, 1, 2, 2, -1, -1]
    assert step.prefill_start_loc is None
    tokens = TokenMap(step.req_indices, step.positions)
    again = attention.mla_step_of_tokens(SPEC, tokens, BATCH[2])
    assert torch.equal(again.decode_lens, step.decode_lens)
    assert torch.equal(again.slot_mapping, step.slot_mapping)
    with pytest.raises(ValueError, match="seq_lens must be given for chunked contexts, got None"):
        attention.mla_step_of_tokens(chunked(), tokens, BATCH[2], BATCH[0])


def test_decode_tokens_beyond_the_capacity_count_as_prefills():
    """The context of request 1's second token is its first token and all earlier tokens."""
    settings = {"next_n": 2, "max_decode_tokens": 2, "workspace_rows": 8}
    step = build_mla_step(chunked(**settings), *BATCH, num_tokens=7)
    assert step.counts.tolist() == [2, 2, 2, 3]
    assert step.decode_lens.tolist() == [5, 3]
    assert step.prefill_start_loc.tolist() == [2, 2, 3, 6, 6]
    assert step.chunk_slots.tolist() == [[20, 21, 22, 4, 5, 6, 7, 12], [-1] * 8]


def test_one_layer_by_hand():
    """Latents (1, 2) and (4, 0) have values 3 c0 + c1 of 5 and 12; scores 0 and ln 3 give 10.25."""
    sizes = {"num_heads": 1, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 1}
    spec = dataclasses.replace(SPEC, softmax_scale=1.0, kv_lora_rank=2, **sizes)
    weight = torch.tensor([[2.0, 0.0], [1.0, -1.0], [3.0, 1.0]])
    halves = split_kv_b_proj(weight, num_heads=1, qk_nope_head_dim=2, v_head_dim=1)
    weights = MlaWeights(torch.tensor([[1.0, 0.0]] * 4), *halves, weight)
    # absorbed: q (x, x) = (3 x, -x); its scores with the latents are x and 12 x
    q = torch.tensor([[[9.0, 9.0, 0.0, 0.0]], [[math.log(3) / 11, math.log(3) / 11, 0.0, 0.0]]])
    inputs = MlaInputs(q, torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.zeros(2, 2))
    for context in ("absorbed", "chunked"):
        case = dataclasses.replace(spec, context=context, workspace_rows=4)
        step = build_mla_step(case, i32([0, 2]), i32([2]), i32([[0]]), num_tokens=2)
        out = mla_layer(case, inputs, weights, MlaCache.allocate(case, 1), step)
        torch.testing.assert_close(out, torch.tensor([[5.0], [10.25]]), rtol=0, atol=1e-5)


def rotated(x, positions, table):
    """Rotate pairs (2 i, 2 i + 1) by the angles of their positions."""
    cos, sin = table[positions].to(F64).chunk(2, -1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def plain_attention(spec, q, kv_c, k_pe, weight, table):
    """Compute causal attention of a whole request over expanded keys and values, in float64."""
    q, kv_c, k_pe, weight = (each.to(F64) for each in (q, kv_c, k_pe, weight))
    positions, nope = torch.arange(q.shape[0]), spec.qk_nope_head_dim
    expanded = (kv_c @ weight.T).unflatten(-1, (spec.num_heads, -1))
    shared = rotated(k_pe, positions, table)[:, None].expand(-1, spec.num_heads, -1)
    k = torch.cat((expanded[..., :nope], shared), -1)
    q = torch.cat((q[..., :nope], rotated(q[..., nope:], positions, table)), -1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * spec.softmax_scale
    weights = logits.masked_fill(positions[None, :] > positions[:, None], -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, expanded[..., nope:]).flatten(1)


def run(spec, seed, length=22, cache=None):
    """Run random steps of three requests; return the errors of all tokens, and the exact output."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    requests, blocks = 3, -(-length // BLOCK)
    heads, rank, rope = spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim
    dims = {"qk_nope_head_dim": spec.qk_nope_head_dim, "v_head_dim": spec.v_head_dim}
    shapes = ((heads, spec.qk_nope_head_dim + rope), (rank,), (rope,))
    tokens = [
        [torch.randn(length, *shape, generator=generator).to(spec.dtype) for shape in shapes]
        for _ in range(requests)
    ]
    weight = torch.randn(heads * sum(dims.values()), rank, generator=generator) * rank**-0.5
    weight = weight.to(spec.dtype)
    angles = torch.rand(length, rope // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1)
    want = [plain_attention(spec, *each, weight, table) for each in tokens]
    q_scale = None if spec.query is None else torch.full((1,), 2.0**-4)
    halves = split_kv_b_proj(weight, num_heads=heads, **dims)
    weights = MlaWeights(table, *halves, weight, q_scale=q_scale)
    pages = rng.sample(range(20), requests * blocks)
    block_table = torch.tensor(pages, dtype=torch.int32).view(requests, blocks)
    cache = cache or MlaCache.allocate(spec, 20)
    cache.kv.fill_(torch.nan if spec.layout == "plain" else 0x7F)
    if cache.scale is not None:
        cache.scale.fill_(2**-6)
    done, errors = [0] * requests, []
    while min(done) < length:
        counts = [min(rng.choice([0, 1, 1, 2, 5, 9]), length - at) for at in done]
        order = sorted(range(requests), key=lambda request: (counts[request] > 2, rng.random()))
        starts, lens, rows, parts = [0], [], [], []
        for request in order:
            begin, end = done[request], done[request] + counts[request]
            starts.append(starts[-1] + counts[request])
            lens.append(end)
            rows.append(request)
            parts.append([each[begin:end] for each in tokens[request]])
        padding = rng.randint(0, 2)
        starts, lens = starts + [starts[-1]] * padding, lens + [0] * padding
        garbage = torch.full((padding, blocks), 2147480000, dtype=torch.int32)
        step_table = torch.cat((block_table[rows], garbage))
        given = [torch.cat(each) for each in zip(*parts, strict=True)]
        nan = [each.new_full((padding, *each.shape[1:]), torch.nan) for each in given]
        inputs = MlaInputs(*(torch.cat(each) for each in zip(given, nan, strict=True)))
        batch = i32(starts), i32(lens), step_table
        step = build_mla_step(spec, *batch, num_tokens=starts[-1] + padding)
        out = mla_layer(spec, inputs, weights, cache, step)
        assert not out[starts[-1] :].any()
        for index, request in enumerate(order):
            begin, end = done[request], done[request] + counts[request]
            got = out[starts[index] : starts[index + 1]].to(F64)
            errors.append((got - want[request][begin:end]).flatten())
            done[request] = end
    return torch.cat(errors), torch.cat(want)


@pytest.mark.parametrize(
    "changed",
    [
        {"context": "absorbed"},
        {"next_n": 2, "max_decode_tokens": 6, "workspace_rows": 16, "max_chunks": 5},
        {"next_n": 2, "max_decode_tokens": 1, "workspace_rows": 70, "max_chunks": 1},
        {"max_decode_tokens": 3, "workspace_rows": 24, "max_chunks": 9, "chunk_plan": "equal"},
    ],
    ids=["absorbed", "chunked", "few decodes", "equal chunks"],
)
@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_are_plain_attention(changed, seed):
    """Unused cache rows and padding hold NaN, and tables of padding requests hold garbage."""
    errors, _ = run(chunked(**changed), seed)
    assert errors.abs().max() < 1e-5


def test_errors_of_codes_at_v3_sizes():
    """The last 16 of 1024 tokens attend, with 16 of V3's heads; the largest attention weight is 0.4
    on average. docs/transformers.md has these errors, relative to attention in float64."""
    heads, length, count, nope, value = 16, 1024, 16, 128, 128
    made = torch.Generator().manual_seed(0)

    def rows(*shape, scale=1.0):
        return (torch.randn(*shape, generator=made) * scale).bfloat16()

    kv_c, k_pe, q = rows(length, 512), rows(length, 64), rows(count, heads, nope + 64, scale=2.0)
    weight = rows(heads * (nope + value), 512, scale=512**-0.5)
    halves = split_kv_b_proj(weight, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value)
    expanded = (kv_c.to(F64) @ weight.to(F64).T).unflatten(-1, (heads, -1))
    shared = k_pe.to(F64)[:, None].expand(-1, heads, -1)
    logits = torch.einsum("qhd,khd->hqk", q.to(F64), torch.cat((expanded[..., :nope], shared), -1))
    future = torch.arange(length)[None] > torch.arange(length - count, length)[:, None]
    scaled = logits * MlaSpec.deepseek_v3().softmax_scale
    p = scaled.masked_fill(future, -torch.inf).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", p, expanded[..., nope:]).flatten(1)
    assert 0.35 < float(p.amax(-1).mean()) < 0.45
    table = torch.tensor([1.0] * 32 + [0.0] * 32).repeat(length, 1)  # an angle of zero
    found = {}
    for layout, query in (("plain", None), ("mla_fp8", None), ("mla_fp8", "fp8")):
        spec = MlaSpec.deepseek_v3(num_heads=heads, layout=layout, query=query)
        cache, all_rows = MlaCache.allocate(spec, 16), torch.arange(length)
        sizes = {"block_size": 64, "layout": layout}
        mla_insert_kv(kv_c, k_pe, cache.kv, all_rows, cache.scale, **sizes)
        batch = (i32([0, count]), i32([length]), torch.arange(16, dtype=torch.int32)[None])
        step = build_mla_step(spec, *batch, num_tokens=count)
        weights = MlaWeights(table, *halves, q_scale=None if query is None else torch.ones(1))
        inputs = MlaInputs(q, kv_c[-count:], k_pe[-count:])
        error = mla_layer(spec, inputs, weights, cache, step).to(F64) - want
        found[layout, query] = float(error.square().mean().sqrt() / want.square().mean().sqrt())
    stated = {("plain", None): 0.004, ("mla_fp8", None): 0.06, ("mla_fp8", "fp8"): 0.08}
    for case, error in stated.items():
        assert abs(found[case] - error) < error / 8, found


def test_a_scale_of_queries_goes_with_codes():
    batch = (i32([0, 1]), i32([1]), i32([[0]]))
    inputs = MlaInputs(torch.ones(1, HEADS, 8), torch.ones(1, RANK), torch.ones(1, ROPE))
    halves = torch.ones(HEADS, NOPE, RANK), torch.ones(HEADS, RANK, VALUE)
    for layout, query, scale, message in (
        ("mla_fp8", "fp8", None, "weights.q_scale must be a tensor, got NoneType"),
        ("mla_fp8", "fp8", torch.ones(2), r"weights.q_scale must have shape \[1\], got \[2\]"),
        ("mla_fp8", None, torch.ones(1), "weights.q_scale must be None with query None"),
    ):
        spec = dataclasses.replace(SPEC, layout=layout, query=query)
        cache = MlaCache.allocate(spec, 1)
        step = build_mla_step(spec, *batch, num_tokens=1)
        weights = MlaWeights(torch.ones(8, ROPE), *halves, q_scale=scale)
        with pytest.raises((ValueError, TypeError), match=f"^mla_layer: {message}"):
            mla_layer(spec, inputs, weights, cache, step)
        assert not cache.kv.any()


def test_break_even_of_released_models():
    assert MlaSpec.deepseek_v3().break_even == 171
    assert round(MlaSpec.deepseek_v3().softmax_scale, 7) == 0.1352338


def test_a_wrong_tensor_is_refused_before_anything_is_written():
    spec = chunked()
    cache = MlaCache.allocate(spec, 2)
    step = build_mla_step(spec, i32([0, 1]), i32([1]), i32([[0]]), num_tokens=1)
    inputs = MlaInputs(torch.ones(1, HEADS, 8), torch.ones(1, RANK), torch.ones(1, ROPE))
    halves = torch.ones(HEADS, NOPE, RANK), torch.ones(HEADS, RANK, VALUE)
    weights = MlaWeights(torch.ones(8, ROPE), *halves)
    with pytest.raises((TypeError, ValueError), match=r"^mla_layer: weights.w_kv_b must"):
        mla_layer(spec, inputs, weights, cache, step)
    wrong = dataclasses.replace(inputs, k_pe=torch.ones(1, ROPE + 1))
    with pytest.raises(ValueError, match=r"^mla_layer: inputs.k_pe must have shape"):
        mla_layer(SPEC, wrong, weights, cache, step)
    assert not cache.kv.any()
