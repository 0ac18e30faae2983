"""Sparse MLA against an oracle in Python floats that reads the bytes of the caches, and the
identities that hold bit for bit. Sampled calls, fakes, graphs and exports:
tests/ops/test_contract.py."""

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.testing.contract.compare import assert_agrees, exact_results
from tests.helpers import BAD_POSITIONS, BAD_REQUESTS, INT32_MAX, LAST_POSITION, i32, i64, rows32
from tests.oracles import mla as oracles
from tests.oracles.mla import BF16, F32, KINDS, assert_attended, column, random_call

INF, NAN = math.inf, math.nan
NO_EXTRA = (None, None, None)
each_kind = pytest.mark.parametrize("kind", KINDS)


def check(call: oracles.Call) -> None:
    """The op, and the float64 results that the contract measures every execution against."""
    expected = call.expected()
    assert_attended(call.run(), expected, call.tensors["q"].dtype)
    exact = exact_results(testing.op_testing(call.op), call.case())
    names = ("out", "lse") if len(exact) == 2 else ("out", "row_max", "lse")
    for name, result in zip(names, exact, strict=True):
        torch.testing.assert_close(result.value, column(expected, name), rtol=1e-9, atol=1e-12)


@each_kind
@pytest.mark.parametrize("seed", range(64))
def test_random_calls(kind: str, seed: int) -> None:
    check(random_call(seed, kind))


@each_kind
@pytest.mark.parametrize("seed", range(24))
def test_random_calls_of_the_paged_op(kind: str, seed: int) -> None:
    check(oracles.random_paged(seed, kind))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("seed", range(24))
def test_random_calls_of_the_gathered_op(dtype: torch.dtype, seed: int) -> None:
    check(oracles.random_gathered(seed, dtype))


def test_random_calls_cover_what_they_should() -> None:
    """No key or some, one cache or two, with and without a sink."""
    seen = set()
    for seed in range(64):
        call = random_call(seed, "bf16")
        for heads in call.expected():
            sink = call.tensors["attn_sink"] is not None
            seen.add((heads[0].lse == -INF, call.tensors["extra_cache"] is None, sink))
    assert len(seen) == 8


@pytest.mark.parametrize("heads", [1, 8, 64, 128])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_head_counts(kind: str, heads: int) -> None:
    call = random_call(3, kind, heads=heads, tokens=1).but(swa_lens=i32([3]))
    call.tensors["swa_indices"] = i32([call.slots[:3]])
    expected = call.expected()
    assert all(math.isfinite(head.lse) for head in expected[0])
    assert_attended(call.run(), expected, BF16)


def one_page(*rows: list[float], dtype: torch.dtype = F32) -> Tensor:
    return torch.tensor([rows], dtype=dtype)


def decode(q: list[float], cache: Tensor, slots: list[int], sink: Any = None, **options: Any):
    """One head of one token over a plain cache."""
    width = len(slots)
    return ops.sparse_mla_decode(
        torch.tensor([[q]], dtype=cache.dtype),
        cache,
        rows32([slots], width),
        i32([options.pop("length", width)]),
        *options.pop("extra", NO_EXTRA),
        None if sink is None else torch.tensor([sink]),
        softmax_scale=options.pop("scale", 0.5),
        swa_block_size=cache.shape[1],
        layout="plain",
        **options,
    )


@pytest.mark.parametrize("sink", [None, -INF, -2.0, 0.0, 3.0, INF])
def test_one_key(sink: float | None) -> None:
    """l = 0.5 (1 * 2 + 1 * 4) = 3; out = v / (1 + exp(sink - l))."""
    out, lse = decode([1.0, 1.0], one_page([2.0, 4.0]), [0], sink)
    share = 1.0 if sink is None else 1 / (1 + math.exp(sink - 3)) if sink < INF else 0.0
    torch.testing.assert_close(out[0, 0], torch.tensor([2 * share, 4 * share]))
    assert lse.item() == pytest.approx(3.0, rel=1e-6)


def test_two_keys() -> None:
    """Logits 0 and ln 3: weights 1/4 and 3/4, with a sink of ln 4 1/8 and 3/8."""
    cache = one_page([0.0, 8.0], [math.log(3), 16.0])
    q = [1.0, 0.0]
    out, lse = decode(q, cache, [0, 1], scale=1.0)
    torch.testing.assert_close(out[0, 0], torch.tensor([0.75 * math.log(3), 14.0]))
    assert lse.item() == pytest.approx(math.log(4), rel=1e-6)
    out, lse = decode(q, cache, [0, 1], math.log(4), scale=1.0)
    torch.testing.assert_close(out[0, 0], torch.tensor([0.375 * math.log(3), 7.0]))
    assert lse.item() == pytest.approx(math.log(4), rel=1e-6), "the sink is not in it"


def test_a_duplicate_counts_twice() -> None:
    """Slot 0 with weight 2/3, also when it is named by both lists."""
    cache = one_page([0.0, 3.0], [0.0, 6.0])
    out, lse = decode([1.0, 0.0], cache, [0, 1, 0])
    assert out[0, 0].tolist() == pytest.approx([0.0, 4.0])
    assert lse.item() == pytest.approx(math.log(3))
    extra = (cache, i32([[0, 1]]), i32([1]))
    joint = decode([1.0, 0.0], cache, [0, 1], extra=extra, extra_block_size=2)
    assert joint.out[0, 0].tolist() == pytest.approx([0.0, 4.0])


@pytest.mark.parametrize("sink", [None, -INF, -1e30, 0.0, 1e30, INF, NAN])
@pytest.mark.parametrize("nothing", ["length 0", "negative length", "no such slot", "no pages"])
def test_no_key(nothing: str, sink: float | None) -> None:
    """Output 0 and lse -inf, whatever the sink is."""
    cache = one_page([1.0, 2.0], [NAN, NAN])
    slots, length = [0, 1], {"length 0": 0, "negative length": -3}.get(nothing, 2)
    if nothing == "no such slot":
        slots = [-1, 2]
    if nothing == "no pages":
        cache = cache[:0]
    out, lse = decode([1.0, 1.0], cache, slots, sink, length=length)
    assert out.tolist() == [[[0.0, 0.0]]]
    assert lse.tolist() == [[-INF]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("sink", [None, 1e30, -1e30])
def test_logits_beyond_what_exp_takes(sign: float, sink: float | None) -> None:
    """Logits of +-90,000 and 0."""
    cache = one_page([300.0, 1.0], [0.0, 2.0])
    out, lse = decode([sign * 300.0, 0.0], cache, [0, 1], sink, scale=1.0)
    highest = [300.0, 1.0] if sign > 0 else [0.0, 2.0]
    assert out[0, 0].tolist() == ([0.0, 0.0] if sink == 1e30 else highest)
    assert lse.item() == (90000.0 if sign > 0 else 0.0)
    alone = decode([sign * 300.0, 0.0], cache, [0], scale=1.0)
    assert alone.out[0, 0].tolist() == [300.0, 1.0]
    assert alone.lse.item() == sign * 90000.0


def test_bytes_by_hand() -> None:
    """Slot 130 of blocks of 64 rows: data at byte 76032, RoPE at 76480, scales at 111760."""
    cache = torch.full(MainLayout(64).shape(3), 0xFF, dtype=torch.uint8)
    flat = cache.view(-1)
    flat[76032 : 76032 + 448] = 0
    flat[76032], flat[76032 + 64], flat[76032 + 447] = 0x38, 0xC4, 0x01  # 1, -3, 2^-9
    flat[76480:76608] = 0
    flat[76480:76482] = torch.tensor([0x80, 0xBF])  # -1
    flat[111760 : 111760 + 7] = torch.tensor([128, 126, 127, 127, 127, 127, 136])
    q = torch.zeros(1, 1, 512, dtype=BF16)
    q[0, 0, 0] = 3.0
    settings = {"softmax_scale": 0.5, "swa_block_size": 64}
    out, lse = ops.sparse_mla_decode(q, cache, i32([[130]]), i32([1]), **settings)
    expected = torch.zeros(512)
    expected[0], expected[64], expected[447], expected[448] = 2.0, -1.5, 1.0, -1.0
    assert torch.equal(out[0, 0].float(), expected)
    assert lse.item() == 3.0


@each_kind
def test_a_sink_only_scales_the_output(kind: str) -> None:
    """By 1 / (1 + exp(sink - lse)); -inf not at all, +inf to zero."""
    call = random_call(5, kind, heads=3, tokens=3)
    call = call.but(swa_lens=i32([6, 1, 2]), attn_sink=None)
    call.tensors["swa_indices"] = i32([call.slots[:2]] * 3)
    out, lse = call.run()
    sink = torch.tensor([0.7, -INF, INF])
    scaled, same = call.but(attn_sink=sink).run()
    assert torch.equal(same, lse)
    assert torch.equal(scaled[:, 1], out[:, 1])
    assert not scaled[:, 2].any()
    share = 1 / (1 + torch.exp(0.7 - lse[:, 0]))
    expected = out[:, 0].float() * share[:, None]
    tolerance = 0.02 if out.dtype == BF16 else 1e-6
    torch.testing.assert_close(scaled[:, 0].float(), expected, rtol=tolerance, atol=tolerance / 10)


@each_kind
def test_window_and_extra_are_one_list(kind: str) -> None:
    """Window only, extra only, and half of the keys in each."""
    call = random_call(7, kind, tokens=2)
    slots, size = call.slots, call.settings["swa_block_size"]
    cache, none = call.tensors["swa_cache"], i32([0, 0])
    both = i32([slots[:2], slots[-2:]])
    call = call.but(swa_indices=both, swa_lens=i32([2, 2]), extra_block_size=size)
    call = call.but(extra_cache=cache, extra_indices=both, extra_lens=none)
    window = call.without_extra()
    expected = window.expected()
    halves = {"swa_indices": both[:, :1], "extra_indices": both[:, 1:]}
    halves |= {"swa_lens": i32([1, 1]), "extra_lens": i32([1, 1])}
    for variant in (
        window,
        call,
        call.but(swa_lens=none, extra_lens=i32([2, 2])),
        call.but(**halves),
    ):
        assert_attended(variant.run(), expected, KINDS[kind][1])


@each_kind
@pytest.mark.parametrize("seed", range(6))
def test_unused_bytes_change_nothing(kind: str, seed: int) -> None:
    """Rows, blocks and padding bytes that hold no wanted row: 0 or NaN; entries behind the lengths:
    rows or slots that do not exist."""
    call = random_call(seed, kind, tokens=3)
    caches = {n: t for n, t in call.zeros.items() if call.tensors[n] is not None}
    clean = call.but(**caches)
    for name in ("swa", "extra"):
        if call.tensors[f"{name}_cache"] is not None:
            indices, lens = call.tensors[f"{name}_indices"], call.tensors[f"{name}_lens"]
            behind = torch.arange(indices.shape[1]) >= lens[:, None]
            limit = caches[f"{name}_cache"].shape[0] * call.settings[f"{name}_block_size"]
            exists = (indices >= 0) & (indices < limit)
            clean.tensors[f"{name}_indices"] = torch.where(behind | ~exists, -1, indices)
            width = indices.shape[1]
            clean.tensors[f"{name}_lens"] = torch.where(lens > width, width, lens.clamp(min=0))
    actual, expected = call.run(), clean.run()
    assert not expected.out.isnan().any()
    assert all(map(torch.equal, actual, expected))


@each_kind
def test_a_token_is_on_its_own(kind: str) -> None:
    """NaN and infinities in the queries of one token, or of one head, stay there."""
    call = random_call(11, kind, tokens=3, heads=3)
    expected = call.run()
    for bad in (NAN, INF):
        q = call.tensors["q"].clone()
        q[1] = bad
        actual = call.but(q=q).run()
        for left, right in zip(actual, expected, strict=True):
            assert torch.equal(left[[0, 2]], right[[0, 2]])
        q = call.tensors["q"].clone()
        q[:, 1] = bad
        actual = call.but(q=q).run()
        for left, right in zip(actual, expected, strict=True):
            assert torch.equal(left[:, [0, 2]], right[:, [0, 2]])


@each_kind
def test_a_key_of_nan_is_not_hidden(kind: str) -> None:
    """A NaN that a token attends to reaches its output, and no other token's."""
    call = random_call(13, kind, tokens=2, heads=2)
    call = call.without_extra().but(swa_lens=i32([1, 1]))
    free = next(s for s in range(INT32_MAX) if s not in call.slots)
    limit = call.tensors["swa_cache"].shape[0] * call.settings["swa_block_size"]
    assert free < limit
    call = call.but(swa_indices=i32([[free], [call.slots[0]]]), attn_sink=None)
    out, lse = call.run()
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()


@each_kind
@pytest.mark.parametrize("how", ["transposed", "backwards", "gaps", "one for all"])
def test_queries_of_any_strides(kind: str, how: str) -> None:
    call = random_call(17, kind, tokens=3, heads=2).but(swa_lens=i32([5, 1, 2]))
    q = call.tensors["q"]
    tokens, heads, width = q.shape
    if how == "one for all":
        q = q[:1].expand(tokens, heads, width)
        view = q
    elif how == "transposed":
        view = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    elif how == "backwards":
        view = q.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        base = torch.full((tokens, heads + 1, 2 * width + 1), NAN, dtype=q.dtype)
        view = base[:, 1:, 1::2]
        view.copy_(q)
    assert torch.equal(view, q)
    call = call.but(q=view)
    actual = call.run()
    assert_attended(actual, call.expected(), q.dtype)
    assert actual.out.is_contiguous()


@each_kind
@pytest.mark.parametrize("op", ["sparse_mla_decode", "sparse_mla_decode_paged"])
def test_splits_do_not_change_the_reference(kind: str, op: str) -> None:
    call = random_call(2, kind) if op == "sparse_mla_decode" else oracles.random_paged(2, kind)
    expected = call.run()
    for num_splits in (1, 2, 7, 1000):
        for batch_invariant in (False, True):
            actual = call.but(num_splits=num_splits, batch_invariant=batch_invariant).run()
            assert all(map(torch.equal, actual, expected))


@each_kind
@pytest.mark.parametrize("seed", range(12))
def test_paged_is_indexed_over_the_dense_indices(kind: str, seed: int) -> None:
    """Bit for bit, with adversarial blocks, requests and positions."""
    call = oracles.random_paged(seed, kind)
    table, size = call.tensors["extra_block_table"][:2], call.settings["extra_block_size"]
    tokens = call.tensors["q"].shape[0]
    rng = Random(seed)
    good = (0, 127, 300, 511, 900, LAST_POSITION)
    positions = i64([rng.choice((*good, rng.choice(BAD_POSITIONS))) for _ in range(tokens)])
    requests = i32([rng.choice((0, 1, 0, 1, rng.choice(BAD_REQUESTS))) for _ in range(tokens)])
    dense = ops.dense_compressed_indices(
        positions,
        requests,
        table,
        block_size=size,
        compress_ratio=128,
        max_compressed=table.shape[1] * size,
    )
    paged = call.but(extra_block_table=table, req_indices=requests, extra_lens=dense.lens).run()
    names = ("q", "swa_cache", "swa_indices", "swa_lens", "extra_cache", "attn_sink")
    tensors = {name: call.tensors[name] for name in names}
    tensors |= {"extra_indices": dense.indices, "extra_lens": dense.lens}
    indexed = oracles.Call(tensors, call.settings, call.slots).run()
    assert all(map(torch.equal, paged, indexed))


@pytest.mark.parametrize("shape", [(0, 2), (0, 0), (2, 0)])
def test_a_table_without_entries(shape: tuple[int, int]) -> None:
    call = oracles.random_paged(1, "fp8")
    call = call.but(extra_block_table=rows32([[]] * shape[0], 0).reshape(shape))
    assert_attended(call.run(), call.expected(), BF16)


def test_no_tokens() -> None:
    for call in (random_call(1, "fp8"), oracles.random_paged(1, "fp8")):
        shared = ("swa_cache", "extra_cache", "extra_block_table", "attn_sink")
        cut = {n: t[:0] for n, t in call.tensors.items() if t is not None and n not in shared}
        out, lse = call.but(**cut).run()
        assert (out.shape, lse.shape) == ((0, *call.tensors["q"].shape[1:]), (0, out.shape[1]))


@pytest.mark.parametrize("seed", range(12))
def test_gathered_is_decode_over_a_copy(seed: int) -> None:
    """Both caches dequantised into one tensor, their lists into one."""
    call = random_call(seed, "fp8", heads=3, tokens=3)
    decoded = call.run()
    kv, columns = [], []
    for name in ("swa", "extra"):
        cache, indices = call.tensors[f"{name}_cache"], call.tensors[f"{name}_indices"]
        if cache is None:
            continue
        size, blocks = call.settings[f"{name}_block_size"], cache.shape[0]
        table, lens = torch.arange(blocks).int()[None], i32([size * blocks])
        rows = ops.gather_k_cache(
            cache, lens, None, table, block_size=size, num_rows=size * blocks
        )[0]
        counts = torch.arange(indices.shape[1]) < call.tensors[f"{name}_lens"][:, None]
        exists = counts & (indices >= 0) & (indices < size * blocks)
        columns.append(torch.where(exists, indices + sum(map(len, kv)), -1))
        kv.append(rows)
    merged = torch.cat(columns, 1)
    tensors = {"q": call.tensors["q"], "kv": torch.cat(kv), "indices": merged}
    tensors |= {"lens": i32([merged.shape[1]] * 3), "attn_sink": call.tensors["attn_sink"]}
    settings = {"softmax_scale": call.settings["softmax_scale"]}
    gathered = oracles.Call(tensors, settings, [], "sparse_mla_gathered").run()
    assert torch.equal(gathered.out, decoded.out)
    assert torch.equal(gathered.lse, decoded.lse)
    assert torch.equal(gathered.max_logits == -INF, decoded.lse == -INF)


@pytest.mark.parametrize(
    "mistake", ["none", "no sink", "a key less", "sink in lse", "log2", "+inf"]
)
def test_the_budget_refuses_wrong_results(mistake: str) -> None:
    call = random_call(19, "fp8", heads=3, tokens=3).without_extra()
    sink, slots = torch.tensor([0.5, 1.0, 2.0]), i32([call.slots[:2]] * 3)
    call = call.but(swa_indices=slots, swa_lens=i32([2, 1, 0]), attn_sink=sink)
    outcome = out, lse = call.run()
    if mistake == "no sink":
        out = call.but(attn_sink=None).run().out
    elif mistake == "a key less":
        out = call.but(swa_lens=i32([1, 1, 0])).run().out
    elif mistake == "sink in lse":
        lse = torch.logaddexp(lse, sink)
    elif mistake == "log2":
        lse = lse / math.log(2)
    elif mistake == "+inf":
        lse = lse.abs()
    op_testing = testing.op_testing("sparse_mla_decode")
    if mistake == "none":
        assert_agrees("right", op_testing, call.case(), (out, lse), outcome)
        return
    with pytest.raises(AssertionError, match=r"budgets from float64|other NaN or infinities"):
        assert_agrees("wrong", op_testing, call.case(), (out, lse), outcome)
