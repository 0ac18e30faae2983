"""Sparse MLA against FlashMLA on a GPU, over caches that we allocated and wrote. Run there with
``pytest -m gpu tests``; ANCHOR_DIR names the baselines' bundle."""

import math

import pytest
import torch
from torch import Tensor

from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import exact_results
from tests.gpu.test_cache import anchor_lib, needs_baselines
from tests.support.attention_batches import (
    DECODE,
    DEVICE,
    GATHERED,
    SCALE,
    decode_case,
    gathered_case,
    kernel,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def assert_upstream(
    what: str, out: Tensor, exact: Tensor, atol: float, rtol: float, cosine: float
) -> None:
    """FlashMLA's own criteria."""
    out, exact = out.double(), exact.double()
    torch.testing.assert_close(out, exact, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {text}")
    apart = 1 - 2 * (out * exact).sum() / (out.square() + exact.square()).sum()
    assert abs(float(apart)) <= cosine, what


@needs_baselines
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
        tokens, tokens, heads, extra, adversarial=False, deviation=deviation, **pages
    ).on(DEVICE)
    if sink:  # inf - inf where a token has no key and a sink of inf
        case.tensors[3].clamp_(min=1)
        case.tensors[2][:, 0] = case.tensors[2].max()
    else:
        case = Case(case.name, (*case.tensors[:-4], *[None] * 4), case.settings)
    q, cache, indices, lens, extra_cache, extra_indices, extra_lens, attn_sink = case.tensors[:8]
    more = {}
    if extra is not None:
        more = {"extra_kv": MainLayout(extra_block).kernel_view(extra_cache)}
        more |= {"extra_indices": extra_indices[:, None], "extra_topk_length": extra_lens}
    upstream, their_lse, _ = flash_mla.sparse_decode(
        q[:, None],
        MainLayout(block).kernel_view(cache),
        indices[:, None],
        topk_length=lens,
        attn_sink=attn_sink,
        scale=SCALE,
        **more,
    )
    upstream, their_lse = upstream[:, 0], their_lse[..., 0]
    no_key = their_lse == math.inf
    their_lse = torch.where(no_key, -math.inf, their_lse)
    ours, our_lse = kernel(DECODE, case)
    exact, exact_lse = (result.value for result in exact_results(testing.op_testing(DECODE), case))
    assert torch.equal(no_key, exact_lse == -math.inf)
    assert not upstream[no_key].any()
    assert not ours[no_key].any()
    decode = {"atol": 1e-2 * deviation, "rtol": 2.01 / 128, "cosine": 5e-6}
    assert_upstream("upstream", upstream, exact, **decode)
    assert_upstream("ours", ours, exact, **decode)
    assert_upstream("ours against upstream", ours, upstream, **decode)
    logs = {"atol": 1e-5 * deviation, "rtol": 8.01 / 65536}
    torch.testing.assert_close(their_lse.double(), exact_lse, **logs)
    torch.testing.assert_close(our_lse.double(), exact_lse, **logs)


@needs_baselines
@pytest.mark.parametrize("topk", [128, 640])
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("deviation", [0.1, 1.5])
def test_flash_mla_prefill_agrees(deviation: float, heads: int, topk: int) -> None:
    flash_mla = anchor_lib().FlashMLA()
    case = gathered_case(heads, 200, heads, topk, deviation).on(DEVICE)
    q, kv, indices, lens, sink = case.tensors
    upstream, *their_logs = flash_mla.sparse_prefill(
        q, kv[:, None], indices[:, None], scale=SCALE, attn_sink=sink, topk_length=lens
    )
    ours, *our_logs = kernel(GATHERED, case)
    exact, *exact_logs = (r.value for r in exact_results(testing.op_testing(GATHERED), case))
    prefill = {"atol": 8e-3 * deviation, "rtol": 3.01 / 128, "cosine": 7e-6}
    assert_upstream("upstream", upstream, exact, **prefill)
    assert_upstream("ours", ours, exact, **prefill)
    assert_upstream("ours against upstream", ours, upstream, **prefill)
    for our, their, value in zip(our_logs, their_logs, exact_logs, strict=True):
        near = 1e-5 * deviation + value.abs() * 2.01 / 65536
        assert bool(((our.double() - value).abs() <= near).all())
        # their README gives binary logarithms, their test natural ones
        units = [((their * unit).double() - value).abs() <= near for unit in (1, math.log(2))]
        assert any(bool(unit.all()) for unit in units)
