"""Sparse MLA on a GPU: kernels against the reference on the CPU, FlashMLA over our caches, batch
invariance, CUDA graphs, caches beyond 4 GiB. Run there with ``pytest -m gpu tests``; ANCHOR_DIR
names the peers' bundle. Without a GPU the same code runs the reference."""

import math

import pytest
import torch
from gpu_attention import (
    DECODE,
    DEVICE,
    GATHERED,
    PAGED,
    PER_TOKEN,
    SCALE,
    agrees,
    case_of,
    decode_case,
    generator,
    integers,
    kernel,
    keys_of,
    normal,
    paged_case,
    settings_of,
    sink_of,
    with_settings,
)
from helpers import INT32_MAX
from hypothesis import HealthCheck, given, settings
from test_gpu_cache import GRAPHS, anchor_lib, needs_anchors
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import Layout, MainLayout, PlainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.compare import assert_agrees, equal, exact_results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
both_ops = pytest.mark.parametrize("name", [DECODE, PAGED])


@both_ops
def test_drawn_calls(name: str) -> None:
    """Every configuration, plain layouts and one-head batches included."""
    spec = OPS[name]

    @settings(
        max_examples=300,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(testing.strategy(name))
    def compare(case: Case) -> None:
        expected = case.run(spec.reference)
        actual = [tensor.cpu() for tensor in kernel(name, case)]
        assert_agrees(name, spec.station("testing"), case, actual, expected)

    compare()


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 3, 64, 300])
def test_batches(name: str, tokens: int, heads: int) -> None:
    agrees(name, case_of(name, 7 * tokens + heads, tokens, heads))


@both_ops
@pytest.mark.parametrize("heads", [1, 12, 65])
def test_head_counts_of_no_whole_tile(name: str, heads: int) -> None:
    agrees(name, case_of(name, heads, 5, heads))


@both_ops
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_splits", [0, 1, 7, 40])
@pytest.mark.parametrize("tokens", [2, 40])
def test_splits(name: str, tokens: int, num_splits: int, batch_invariant: bool) -> None:
    """More splits than blocks of keys too."""
    agrees(
        name,
        case_of(name, 3, tokens, 64, num_splits=num_splits, batch_invariant=batch_invariant),
    )


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (3, 128), (64, 8), (300, 64)])
def test_window_only(tokens: int, heads: int, num_splits: int) -> None:
    agrees(DECODE, decode_case(tokens, tokens, heads, None, num_splits=num_splits))


@pytest.mark.parametrize("sizes", [(256, 64), (64, 2), (1, 3), (53, 61)])
@pytest.mark.parametrize("extra", [1, 63, 65, 1024])
def test_page_sizes_and_widths(sizes: tuple[int, int], extra: int) -> None:
    agrees(DECODE, decode_case(5, 9, 64, extra, block=sizes[0], extra_block=sizes[1]))


@pytest.mark.parametrize("heads", [64, 128])
def test_one_token_of_a_million(heads: int) -> None:
    """8192 compressed rows of one request: every SM has a split."""
    case = paged_case(1, 1, heads, columns=4096)
    case.tensors[5].fill_(8190)
    case.tensors[6].fill_(0)
    agrees(PAGED, case)
    for num_splits in (1, 100, 200):
        agrees(PAGED, with_settings(case, num_splits=num_splits))


@both_ops
@pytest.mark.parametrize("how", ["transposed", "gaps", "one for all"])
def test_queries_of_any_strides(name: str, how: str) -> None:
    case = case_of(name, 11, 6, 64)
    q = case.tensors[0].to(DEVICE)
    if how == "transposed":
        view = q.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    elif how == "gaps":
        view = torch.full((6, 65, 1025), math.nan, dtype=q.dtype, device=DEVICE)[:, 1:, 1::2]
        view.copy_(q)
    else:
        view = q[:1].expand(6, 64, 512)
    case = Case(case.name, (view.cpu().contiguous(), *case.tensors[1:]), case.settings)
    rest = case.on(DEVICE)
    agrees(name, case, tuple(OPS[name].op(view, *rest.tensors[1:], **rest.settings)))


@both_ops
def test_nothing_to_attend_with(name: str) -> None:
    """No tokens, no heads."""
    case = case_of(name, 2, 4, 8).on(DEVICE)
    no_heads = (case.tensors[0][:, :0], *case.tensors[1:-1], case.tensors[-1][:0])
    for tensors in (no_heads, rows_of(case, slice(0, 0)).tensors):
        out, lse = OPS[name].op(*tensors, **case.settings)
        assert out.shape == tensors[0].shape
        assert lse.shape == out.shape[:2]


@both_ops
@pytest.mark.parametrize("num_splits", [0, 1])
def test_unused_bytes_change_nothing(name: str, num_splits: int) -> None:
    """Rows, pages and padding bytes that no token reads are 0 in one run and NaN in the other."""
    for tokens in (3, 64):
        zero, nan = (
            kernel(name, case_of(name, 5, tokens, 64, fill=fill, num_splits=num_splits))
            for fill in (0, 0xFF)
        )
        assert not nan[0].isnan().any()
        assert all(map(torch.equal, zero, nan))


@both_ops
def test_a_token_of_nan_leaves_the_others_alone(name: str) -> None:
    case = case_of(name, 6, 40, 64).on(DEVICE)
    before = kernel(name, case)
    case.tensors[0][7], case.tensors[0][20] = math.nan, math.inf
    after = kernel(name, case)
    others = [token for token in range(40) if token not in (7, 20)]
    for left, right in zip(before, after, strict=True):
        assert torch.equal(left[others], right[others])


def rows_of(case: Case, chosen: slice | list[int]) -> Case:
    """The same call for some of the tokens."""
    tensors = list(case.tensors)
    for place in PER_TOKEN:
        if tensors[place] is not None:
            tensors[place] = tensors[place][chosen]
    return Case(case.name, tuple(tensors), case.settings)


@both_ops
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(
    "fixed", [{"batch_invariant": True}, {"num_splits": 1}, {"num_splits": 3}], ids=str
)
def test_a_token_has_the_same_bits_in_every_batch(name: str, heads: int, fixed: dict) -> None:
    """Alone, in a batch of 200, in another order, and in another call of it."""
    case = case_of(name, 9, 200, heads, **fixed)
    whole = kernel(name, case)
    assert all(map(equal, whole, kernel(name, case)))
    order = torch.randperm(200, generator=generator(1)).tolist()
    shuffled = kernel(name, rows_of(case, order))
    assert all(equal(left, right[order]) for left, right in zip(shuffled, whole, strict=True))
    for token in (*range(9), 57, 128, 131, 132, 198, 199):
        alone = kernel(name, rows_of(case, slice(token, token + 1)))
        for left, right in zip(alone, whole, strict=True):
            assert equal(left[0], right[token]), token


def assert_upstream(
    what: str, out: Tensor, exact: Tensor, atol: float, rtol: float, cosine: float
) -> None:
    """FlashMLA's own criteria."""
    out, exact = out.double(), exact.double()
    torch.testing.assert_close(out, exact, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")
    apart = 1 - 2 * (out * exact).sum() / (out.square() + exact.square()).sum()
    assert abs(float(apart)) <= cosine, what


@needs_anchors
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("sizes", [(64, 64), (256, 64), (256, 2)])
@pytest.mark.parametrize("extra", [None, 512, 1024])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("tokens", "deviation"), [(2, 0.1), (32, 1.5), (150, 0.1), (150, 1.5)])
def test_flash_mla_agrees(
    tokens: int,
    deviation: float,
    heads: int,
    extra: int | None,
    sizes: tuple[int, int],
    sink: bool,
) -> None:
    """Over one pair of caches, allocated and written by us: both against float64, and against each
    other. Upstream's tolerances are for values of deviation 0.1 and grow with them."""
    flash_mla = anchor_lib().FlashMLA()
    block, extra_block = sizes
    pages = {"block": block, "extra_block": extra_block}
    case = decode_case(
        tokens, tokens, heads, extra, hostile=False, deviation=deviation, **pages
    ).on(DEVICE)
    if sink:  # inf - inf where a token has no key and a sink of inf
        case.tensors[3].clamp_(min=1)
        case.tensors[2][:, 0] = case.tensors[2].max()
    else:
        case = Case(case.name, (*case.tensors[:-1], None), case.settings)
    q, cache, indices, lens, extra_cache, extra_indices, extra_lens, attn_sink = case.tensors
    more = {}
    if extra is not None:
        more = {"extra_kv": MainLayout(extra_block).kernel_view(extra_cache)}
        more |= {"extra_indices": extra_indices[:, None], "extra_topk_length": extra_lens}
    theirs, their_lse, _ = flash_mla.sparse_decode(
        q[:, None],
        MainLayout(block).kernel_view(cache),
        indices[:, None],
        topk_length=lens,
        attn_sink=attn_sink,
        scale=SCALE,
        **more,
    )
    theirs, their_lse = theirs[:, 0], their_lse[..., 0]
    no_key = their_lse == math.inf
    their_lse = torch.where(no_key, -math.inf, their_lse)
    ours, our_lse = kernel(DECODE, case)
    exact, exact_lse = (result.value for result in exact_results(testing.station(DECODE), case))
    assert torch.equal(no_key, exact_lse == -math.inf)
    assert not theirs[no_key].any()
    assert not ours[no_key].any()
    decode = {"atol": 1e-2 * deviation, "rtol": 2.01 / 128, "cosine": 5e-6}
    assert_upstream("theirs", theirs, exact, **decode)
    assert_upstream("ours", ours, exact, **decode)
    assert_upstream("ours against theirs", ours, theirs, **decode)
    logs = {"atol": 1e-5 * deviation, "rtol": 8.01 / 65536}
    torch.testing.assert_close(their_lse.double(), exact_lse, **logs)
    torch.testing.assert_close(our_lse.double(), exact_lse, **logs)


def gathered_case(seed: int, tokens: int, heads: int, topk: int, deviation: float = 1.5) -> Case:
    """Rows without NaN, and at least one key per token: FlashMLA masks less than we do."""
    made = generator(seed)
    kv = keys_of(made, 3000, deviation)
    indices = integers(made, 0, len(kv), tokens, topk)
    indices[:, 1:][torch.rand(tokens, topk - 1, generator=made) < 0.05] = -1
    lens = integers(made, 1, topk + 1, tokens)
    tensors = (normal(made, tokens, heads, 512), kv, indices, lens, sink_of(made, heads))
    return Case("gathered", tensors, {"softmax_scale": SCALE})


@needs_anchors
@pytest.mark.parametrize("topk", [128, 640])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("deviation", [0.1, 1.5])
def test_flash_mla_prefill_agrees(deviation: float, heads: int, topk: int) -> None:
    flash_mla = anchor_lib().FlashMLA()
    case = gathered_case(heads, 200, heads, topk, deviation).on(DEVICE)
    q, kv, indices, lens, sink = case.tensors
    theirs, *their_logs = flash_mla.sparse_prefill(
        q, kv[:, None], indices[:, None], scale=SCALE, attn_sink=sink, topk_length=lens
    )
    ours, *our_logs = kernel(GATHERED, case)
    exact, *exact_logs = (r.value for r in exact_results(testing.station(GATHERED), case))
    prefill = {"atol": 8e-3 * deviation, "rtol": 3.01 / 128, "cosine": 7e-6}
    assert_upstream("theirs", theirs, exact, **prefill)
    assert_upstream("ours", ours, exact, **prefill)
    assert_upstream("ours against theirs", ours, theirs, **prefill)
    for our, their, value in zip(our_logs, their_logs, exact_logs, strict=True):
        near = 1e-5 * deviation + value.abs() * 2.01 / 65536
        assert bool(((our.double() - value).abs() <= near).all())
        # their README gives binary logarithms, their test natural ones
        units = [((their * unit).double() - value).abs() <= near for unit in (1, math.log(2))]
        assert any(bool(unit.all()) for unit in units)


@pytest.mark.parametrize("tokens", [1, 300])
def test_gathered_agrees_with_the_cpu(tokens: int) -> None:
    case = gathered_case(5, tokens, 64, 640)
    agrees(GATHERED, case)
    compiled = torch.compile(OPS[GATHERED].op, fullgraph=True)
    moved = case.on(DEVICE)
    agrees(GATHERED, case, tuple(compiled(*moved.tensors, **moved.settings)))


class Layer(torch.nn.Module):
    """A decode step of one layer whose caches are buffers."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__()
        self.op, self.settings = getattr(ops, name), case.settings
        self.register_buffer("swa_cache", case.tensors[1])
        self.register_buffer("extra_cache", case.tensors[4])

    def forward(self, q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        swa = (self.swa_cache, *rest[:2])
        return tuple(self.op(q, *swa, self.extra_cache, *rest[2:], **self.settings))


def inputs_of(case: Case) -> tuple[Tensor, ...]:
    return tuple(tensor for place, tensor in enumerate(case.tensors) if place not in (1, 4))


@both_ops
@pytest.mark.parametrize("captured_by", ["inductor", "torch.cuda.graph"])
@pytest.mark.parametrize("tokens", [4, 64])
def test_captured_steps_follow_their_lens(name: str, captured_by: str, tokens: int) -> None:
    """One compiled graph with our kernels, replayed after lens, indices and queries changed in
    place, without a host sync."""
    torch._dynamo.reset()
    case = case_of(name, 0, tokens, 64)
    layer, static = Layer(name, case).to(DEVICE), [t.to(DEVICE) for t in inputs_of(case)]
    options = GRAPHS if captured_by == "inductor" else {}
    step = torch.compile(layer, fullgraph=True, options=options)
    _, code = compile_and_get_code(step, *static)
    assert "split_keys_kernel" in code
    assert "join_splits_kernel" in code
    results: list[tuple[Tensor, ...]] = []
    if captured_by == "inductor":
        for _ in range(3):
            step(*static)

        def replay() -> None:
            results[:] = [step(*static)]
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(step(*static))
        replay = graph.replay
    for seed in range(1, 7):
        fresh = case_of(name, seed, tokens, 64)  # over the same caches
        assert all(torch.equal(fresh.tensors[place], case.tensors[place]) for place in (1, 4))
        for tensor, value in zip(static, inputs_of(fresh), strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected = [tensor.to(DEVICE) for tensor in fresh.run(OPS[name].reference)]
        station = testing.station(name)
        assert_agrees(f"replay {seed}", station, fresh.on(DEVICE), results[0], expected)


def far_slots(layout: Layout, blocks: int) -> Tensor:
    """Slots around the bytes 2^31 and 2^32, and the last ones."""
    borders = (2**31, 2**32, blocks * layout.page_bytes)
    pages = [border // layout.page_bytes - back for border in borders for back in (1, 2, 3)]
    slots = [page * layout.block_size + row for page in pages for row in (0, layout.block_size - 1)]
    assert max(slots) < INT32_MAX
    return torch.tensor(slots)


@both_ops
@pytest.mark.parametrize("kind", ["v4_fp8", "plain"])
def test_caches_beyond_4_gib(name: str, kind: str) -> None:
    """Rows whose bytes lie past 2^31 and 2^32, of plain rows whose elements do: what the same rows
    of a small cache give."""
    made, layout = generator(3), MainLayout(64) if kind == "v4_fp8" else PlainLayout(64)
    gibibytes = 5 if kind == "v4_fp8" else 8
    blocks = math.ceil(gibibytes * 2**30 / layout.page_bytes)
    slots = far_slots(layout, blocks)
    k, far = keys_of(made, len(slots)), len(slots)
    large, small = layout.allocate(blocks, DEVICE), layout.allocate(far, "cpu")
    assert large.nbytes > 2**32
    near = torch.arange(far) * 64 + slots % 64  # a page each, the same row of it
    for cache, places in ((large, slots), (small, near)):
        rows = k.to(cache.device), cache, places.to(cache.device)
        if kind == "plain":
            ops.insert_k_cache(*rows)
        else:
            ops.quantize_and_insert_k_cache(*rows, block_size=64)

    tokens, heads = 6, 64
    q, sink = normal(made, tokens, heads, 512), sink_of(made, heads)
    chosen = integers(made, 0, far, tokens, 24).long()
    lens = torch.full((tokens,), 24, dtype=torch.int32)
    table = integers(made, 0, far, tokens, 3).long()
    chosen[0] = torch.arange(24) % far

    def call(cache: Tensor, places: Tensor) -> Case:
        swa = (cache, places[chosen].int(), lens)
        if name == DECODE:
            extra = (cache, places[chosen.flip(1)].int(), lens // 2)
        else:
            pages = (places // 64)[table].int()
            extra = (cache, torch.full_like(lens, 150), torch.arange(tokens).int(), pages)
        return Case("far", (q, *swa, *extra, sink), settings_of(64, 64, layout=kind))

    # pages of the large cache hold two of the rows each, those of the small one a row: the paged
    # op sees them as far as the table says, so both must hold the same pages
    if name == PAGED:
        small = small.new_zeros(layout.shape(far))
        small.copy_(large[(slots // 64).to(DEVICE)])
    expected = call(small, near)
    moved = call(large, slots)
    tensors = tuple(t.to(DEVICE) for t in moved.tensors)
    actual = tuple(OPS[name].op(*tensors, **moved.settings))
    agrees(name, expected, actual)
    del large, tensors, moved
    torch.cuda.empty_cache()


def test_queries_beyond_4_gib() -> None:
    """The last of 33,000 tokens of 128 heads, whose queries and output lie past 2^31 elements."""
    tokens, made = 33000, generator(4)
    case = decode_case(4, 8, 128, None)
    q = case.tensors[0].repeat(tokens // 8, 1, 1).to(DEVICE)
    assert q.numel() > 2**31
    moved = case.on(DEVICE)
    indices = moved.tensors[2].repeat(tokens // 8, 1)
    lens = moved.tensors[3].repeat(tokens // 8)
    order = torch.randperm(tokens, generator=made).to(DEVICE)[: tokens - 8]
    indices[: tokens - 8] = indices[order]
    rest = (None, None, None, moved.tensors[-1])
    out, lse = OPS[DECODE].op(q, moved.tensors[1], indices, lens, *rest, **case.settings)
    agrees(DECODE, case, (out[-8:], lse[-8:]))
    del q, out
    torch.cuda.empty_cache()
