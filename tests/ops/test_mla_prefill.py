"""Sparse MLA for prefill: an oracle in Python floats that reads the bytes of the caches, and the
ops and batches that it must agree with. Which keys a token sees:
tests/ops/test_mla_prefill_keys.py; sampled calls, fakes, graphs and exports:
tests/ops/test_contract.py."""

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.testing.contract.compare import assert_agrees, equal
from tests.helpers import INT32_MAX, strided, widened
from tests.ops.test_sparse_mla import check
from tests.oracles.mla import BF16, F32, KINDS, assert_attended
from tests.oracles.prefill import Prefill, batch, random_prefill
from tests.support.sampled import sampled

INF, NAN = math.inf, math.nan
OP_TESTING = testing.op_testing("sparse_mla_prefill")
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("seed", range(32))
def test_random_batches(kind: str, seed: int) -> None:
    check(random_prefill(seed, kind))


def test_random_batches_cover_what_they_should() -> None:
    """No key or some, without compressed rows, all of them or some, with and without a sink."""
    found = set()
    for seed in range(96):
        call = random_prefill(seed, "fp32", heads=1)
        names = ("extra_cache", "topk_indices", "attn_sink")
        given = tuple(call.tensors[name] is not None for name in names)
        found |= {(*given, heads[0].lse == -INF) for heads in call.expected()}
    assert len(found) == 12


@sampled(60)
@given(
    seed=st.integers(0, 2**32),
    requests=st.lists(
        st.tuples(st.sampled_from((0, 1, 6, 7, 8, 9)), st.integers(0, 4)), max_size=4
    ),
    window=st.sampled_from((1, 2, 7, 8, 9)),
    ratio=st.sampled_from((1, 2, 4, 8)),
    sizes=st.tuples(st.sampled_from((1, 2, 8)), st.sampled_from((1, 2, 3))),
    rows=st.sampled_from(("selected", "all", "none")),
    adversarial=st.sampled_from((0.0, 0.3)),
)
def test_batch_structures(seed: int, **structure: Any) -> None:
    check(batch(Random(seed), "fp32", **structure))


STARTS = [(0, 5), (7, 1), (3, 0), (8, 4)]


def whole(kind: str, seed: int, **changed: Any) -> Prefill:
    made = {"window": 4, "ratio": 2, "sizes": (2, 3), "adversarial": 0.2, **changed}
    return batch(Random(seed), kind, made.pop("requests", STARTS), **made)


def same(call: Prefill, actual: Any, expected: Any) -> None:
    assert_agrees("same", OP_TESTING, call.case(), tuple(actual), tuple(expected))


@each_kind
@pytest.mark.parametrize("rows", ["selected", "all", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_and_single_tokens_are_the_whole(kind: str, rows: str, seed: int) -> None:
    """Decode, which is one token at a time, chunks of any lengths, and any order of tokens."""
    call, rng = whole(kind, seed, rows=rows), Random(seed)
    expected, count = call.run(), call.tensors["q"].shape[0]
    order = rng.sample(range(count), count)
    cuts = sorted({0, count, *rng.sample(range(count), 3)})
    chunkings = [
        [slice(token, token + 1) for token in range(count)],
        [slice(left, right) for left, right in pairwise(cuts)],
        [order],
    ]
    for chunks in chunkings:
        parts = [call.tokens(chunk).run() for chunk in chunks]
        joined = [torch.cat(each) for each in zip(*parts, strict=True)]
        if chunks == [order]:
            joined = [tensor[torch.tensor(order).argsort()] for tensor in joined]
        same(call, joined, expected)


def decode_tensors(call: Prefill) -> dict[str, Tensor | None]:
    """The call's arguments for decode, the window's lists among them."""
    tensors = call.tensors
    window = ops.swa_indices_and_lens(
        tensors["positions"],
        tensors["req_indices"],
        tensors["swa_block_table"],
        block_size=call.settings["swa_block_size"],
        window_size=call.settings["window_size"],
    )
    given = {name: tensors[name] for name in ("q", "swa_cache", "extra_cache", "attn_sink")}
    return {**given, "swa_indices": window.indices, "swa_lens": window.lens}


def shared_settings(call: Prefill) -> dict[str, Any]:
    names = ("softmax_scale", "swa_block_size", "extra_block_size", "layout")
    return {name: call.settings[name] for name in names}


def visible(call: Prefill) -> Tensor:
    """Rows that every token may see: none of padding."""
    reqs = call.tensors["swa_block_table"].shape[0]
    positions, owners = call.tensors["positions"], call.tensors["req_indices"]
    real = (positions >= 0) & (positions < INT32_MAX) & (owners >= 0) & (owners < reqs)
    return torch.where(real, (positions + 1) // call.settings["compress_ratio"], 0).int()


LATE = [(3, 4), (9, 2), (30, 1)]  # every window of 4 is full


@each_kind
@pytest.mark.parametrize("requests", [STARTS, LATE], ids=["starts", "late"])
@pytest.mark.parametrize("seed", range(6))
def test_selected_rows_are_decode_over_their_slots(kind: str, requests: Any, seed: int) -> None:
    """C4. Bit for bit where every window is full, so that all keys are in the same order."""
    exact = requests is LATE
    call = whole(kind, seed, requests=requests, padding=0 if exact else 1, adversarial=0.0)
    chosen, limit = call.tensors["topk_indices"], visible(call)[:, None]
    found = ops.global_topk_indices_and_lens(
        torch.where(chosen < limit, chosen, -1),
        call.tensors["req_indices"],
        call.tensors["extra_block_table"],
        block_size=call.settings["extra_block_size"],
    )
    tensors = {**decode_tensors(call), "extra_indices": found.indices, "extra_lens": found.lens}
    decoded, actual = ops.sparse_mla_decode(**tensors, **shared_settings(call)), call.run()
    same(call, actual, decoded)
    assert not exact or all(map(equal, actual, decoded))


@each_kind
@pytest.mark.parametrize("requests", [STARTS, LATE], ids=["starts", "late"])
@pytest.mark.parametrize("seed", range(6))
def test_all_rows_are_paged_decode(kind: str, requests: Any, seed: int) -> None:
    """C128."""
    exact = requests is LATE
    call = whole(
        kind, seed, requests=requests, rows="all", padding=0 if exact else 1, adversarial=0.0
    )
    tensors = decode_tensors(call)
    tensors |= {name: call.tensors[name] for name in ("req_indices", "extra_block_table")}
    tensors["extra_lens"] = visible(call)
    decoded = ops.sparse_mla_decode_paged(**tensors, **shared_settings(call))
    actual = call.run()
    same(call, actual, decoded)
    assert not exact or all(map(equal, actual, decoded))


@each_kind
@pytest.mark.parametrize("seed", range(4))
def test_adversarial_batches_are_decode_too(kind: str, seed: int) -> None:
    """Windows with holes, tokens of no request: the ops of decode skip the same."""
    call = whole(kind, seed, adversarial=0.4, rows="none")
    tensors = decode_tensors(call)
    same(call, call.run(), ops.sparse_mla_decode(**tensors, **shared_settings(call)))


@each_kind
@pytest.mark.parametrize("rows", ["selected", "all"])
def test_pages_in_any_order(kind: str, rows: str) -> None:
    """The same blocks elsewhere in the caches, and requests elsewhere in the tables: every bit."""
    call, made = whole(kind, 5, rows=rows, adversarial=0.0), torch.Generator().manual_seed(0)
    expected, moved = call.run(), {}
    for name in ("swa", "extra"):
        cache = call.tensors[f"{name}_cache"]
        order = torch.randperm(len(cache), generator=made)
        table = order.argsort()[call.tensors[f"{name}_block_table"].long()].int()
        moved |= {f"{name}_cache": cache[order], f"{name}_block_table": table}
    assert all(map(equal, call.but(**moved).run(), expected))
    order = torch.randperm(len(STARTS), generator=made)
    owners = call.tensors["req_indices"]
    moved["req_indices"] = torch.where(owners < 0, owners, order.argsort()[owners.long()].int())
    for name in ("swa_block_table", "extra_block_table"):
        moved[name] = moved[name][order]
    assert all(map(equal, call.but(**moved).run(), expected))


@each_kind
@pytest.mark.parametrize("seed", range(6))
def test_unused_bytes_change_nothing(kind: str, seed: int) -> None:
    """Every row that no token sees, and padding bytes: NaN, or 0."""
    call = random_prefill(seed, kind)
    actual, expected = call.run(), call.but(**call.zeros).run()
    assert not actual.out.isnan().any()
    assert all(map(torch.equal, actual, expected))


@each_kind
def test_a_token_is_on_its_own(kind: str) -> None:
    call = whole(kind, 2, adversarial=0.0)
    expected, q = call.run(), call.tensors["q"].clone()
    q[1], q[4] = NAN, INF
    actual = call.but(q=q).run()
    others = [token for token in range(len(q)) if token not in (1, 4)]
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left[others], right[others])


@each_kind
def test_a_key_of_nan_is_not_hidden(kind: str) -> None:
    """A NaN that a token sees reaches its output: here the first key, so that of tokens 0 to 3."""
    call = whole(kind, 3, requests=[(0, 7)], padding=0, rows="none", adversarial=0.0)
    page = int(call.tensors["swa_block_table"][0, 0])
    cache = call.tensors["swa_cache"].clone()
    cache[page, 0] = NAN if kind != "fp8" else 0x7F
    out, lse = call.but(swa_cache=cache, attn_sink=None).run()
    assert out[:4, :, 0].isnan().all()
    assert lse[:4].isnan().all()
    assert out[4:].isfinite().all()


@each_kind
@pytest.mark.parametrize("rows", ["selected", "all"])
def test_arguments_of_any_strides(kind: str, rows: str) -> None:
    call = whole(kind, 6, rows=rows)
    expected, tensors = call.run(), dict(call.tensors)
    for name in ("positions", "req_indices"):
        tensors[name] = strided(tensors[name])
    for name in ("swa_block_table", "extra_block_table", "topk_indices"):
        if tensors[name] is not None:
            tensors[name] = strided(widened(tensors[name]))
    q = tensors["q"]
    base = torch.full((q.shape[1] + 1, q.shape[0], 2 * q.shape[2] + 1), NAN, dtype=q.dtype)
    tensors["q"] = base[1:, :, 1::2].transpose(0, 1)
    tensors["q"].copy_(q)
    actual = call.but(**tensors).run()
    assert actual.out.is_contiguous()
    same(call, actual, expected)
    tensors["q"] = q
    assert all(map(equal, call.but(**tensors).run(), expected))


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_batches_of_nothing(kind: str) -> None:
    call = whole(kind, 1)
    none = call.tokens(slice(0, 0)).run()
    assert (none.out.shape, none.lse.shape) == ((0, *call.tensors["q"].shape[1:]), (0, 2))
    no_heads = call.but(q=call.tensors["q"][:, :0], attn_sink=None).run()
    assert (no_heads.out.shape[1], no_heads.lse.shape[1]) == (0, 0)
    for name in ("swa_block_table", "extra_block_table"):
        tables = {name: call.tensors[name][:, :0]}
        check(call.but(**tables))
    tables = {name: call.tensors[name][:0] for name in ("swa_block_table", "extra_block_table")}
    out, lse = call.but(**tables).run()
    assert not out.any()
    assert (lse == -INF).all()


@pytest.mark.parametrize("heads", [1, 8, 64, 128])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_head_counts(kind: str, heads: int) -> None:
    call = whole(kind, 3, requests=[(4, 1)], heads=heads, padding=0)
    assert_attended(call.run(), call.expected(), BF16)


@pytest.mark.parametrize(
    "mistake", ["none", "no sink", "a key less", "another row", "sink in lse", "log2"]
)
def test_the_budget_refuses_wrong_results(mistake: str) -> None:
    sink = torch.tensor([0.5, 1.0])
    call = whole("fp8", 8, adversarial=0.0).but(attn_sink=sink)
    outcome = out, lse = call.run()
    if mistake == "no sink":
        out = call.but(attn_sink=None).run().out
    elif mistake == "a key less":
        out = call.but(window_size=3).run().out
    elif mistake == "another row":
        chosen = call.tensors["topk_indices"].clone()
        chosen[-2, 0] = -1
        out = call.but(topk_indices=chosen).run().out
    elif mistake == "sink in lse":
        lse = torch.logaddexp(lse, sink)
    elif mistake == "log2":
        lse = lse / math.log(2)
    if mistake == "none":
        assert_agrees("right", OP_TESTING, call.case(), (out, lse), outcome)
        return
    with pytest.raises(AssertionError, match=r"budgets from float64|other NaN or infinities"):
        assert_agrees("wrong", OP_TESTING, call.case(), (out, lse), outcome)


def test_dtypes_of_the_results() -> None:
    for kind, (_, dtype, _) in KINDS.items():
        out, lse = random_prefill(1, kind).run()
        assert (out.dtype, lse.dtype) == (dtype, F32)
