"""Dense MLA: rows, offsets, absorption and decode, against numbers and plain Python."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch.utils._python_dispatch import TorchDispatchMode

import dsv4_ops as ops
from dsv4_ops.core.layout import MlaDsFp8Layout
from dsv4_ops.core.registry import OPS
from dsv4_ops.reference.mla import KEYS_AT_A_TIME
from dsv4_ops.testing.cases.mla import worked_decode
from tests.helpers import i32, i64

BF16, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def test_offsets_of_rows_of_656_bytes():
    layout = MlaDsFp8Layout(64)
    assert layout.shape(3) == (3, 64, 656)
    offsets = (layout.data_offset(130), layout.scale_offset(130), layout.rope_offset(130))
    assert offsets == (85280, 85792, 85808)
    cache = layout.allocate(3)
    kv_c, k_pe = torch.full((1, 512), 448.0), torch.full((1, 64), 1.0)
    ops.mla_insert_kv(kv_c, k_pe, cache, i64([130]), block_size=64, layout="mla_ds_fp8")
    stored = cache.view(-1)
    assert stored[: offsets[0]].count_nonzero() == 0
    assert stored[offsets[0] :][:513].tolist() == [0x7E] * 512 + [0]
    assert stored[offsets[1] :][:16].view(F32).tolist() == [1.0] * 4
    assert stored[offsets[2] :][:128].view(BF16).tolist() == [1.0] * 64
    assert stored[offsets[0] + 656 :].count_nonzero() == 0


def test_absorbed_scores_and_values_are_those_of_expanded_keys():
    weight = torch.tensor([[2.0, 0.0], [1.0, -1.0], [3.0, 1.0]])
    sizes = {"num_heads": 1, "qk_nope_head_dim": 2, "v_head_dim": 1}
    w_uk_t, w_uv = ops.split_kv_b_proj(weight, **sizes)
    rows = torch.tensor([[1.0, 2.0, 1.0], [4.0, 0.0, 0.0]])
    q = ops.mla_absorb_q(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]]), w_uk_t)
    assert (q[0] @ rows.T).tolist() == [[3.0, 16.0]]
    mean = (rows[0, :2] + 3 * rows[1, :2]) / 4
    assert ops.mla_v_up(mean.view(1, 1, 2), w_uv).tolist() == [[10.25]]


class Scaled(nn.Module):
    """A layer that stores its weight in a form of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self.register_buffer("stored", weight.T * 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.stored.to(x.dtype) / 4)


def test_weights_of_any_linear_layer():
    sizes = {"num_heads": 3, "qk_nope_head_dim": 4, "v_head_dim": 2}
    layer = nn.Linear(5, 18)
    heads = layer.weight.detach().view(3, 6, 5)
    for weight in (layer, layer.weight, Scaled(layer.weight.detach())):
        w_uk_t, w_uv = ops.split_kv_b_proj(weight, **sizes, dtype=F32)
        assert torch.equal(w_uk_t, heads[:, :4])
        assert torch.equal(w_uv, heads[:, 4:].mT)
        assert w_uk_t.is_contiguous()
        assert w_uv.is_contiguous()
        assert not w_uk_t.requires_grad


def test_weights_in_blocks_of_codes():
    """A scale has 128 x 128 values, at the ends fewer: 2 heads are 130 rows of 129 columns."""
    codes = torch.full((130, 129), 2.0).to(E4M3)
    scale = torch.tensor([[1.0, 0.5], [3.0, 5.0]])
    sizes = {"num_heads": 2, "qk_nope_head_dim": 64, "v_head_dim": 1}
    w_uk_t, w_uv = ops.split_kv_b_proj(codes, scale, **sizes)
    assert (w_uk_t.dtype, w_uk_t.shape, w_uv.shape) == (BF16, (2, 64, 129), (2, 129, 1))
    assert w_uk_t[0, :, 127].unique().tolist() == [2.0]
    assert w_uk_t[0, :, 128].unique().tolist() == [1.0]
    assert w_uk_t[1, 62:, 0].tolist() == [2.0, 6.0]  # row 128 is in the second block
    assert w_uv[1, [0, 127, 128], 0].tolist() == [6.0, 6.0, 10.0]


def quantized_by_vllm(x):
    """Quantise as ``dynamic_per_batched_tensor_quant``: scale and products have the dtype of x."""
    least, most = x.aminmax()
    scale = 448.0 / torch.maximum(least.abs(), most.abs()).clamp(min=1e-10)
    codes = (x * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).int(), scale.float().reciprocal()


@pytest.mark.parametrize(
    ("dtype", "codes", "scales"), [(torch.float32, 0.0, 2**-22), (torch.bfloat16, 0.08, 2**-7)]
)
def test_how_far_vllm_is_from_one_scale_in_float32(dtype, codes, scales):
    """The op's docstring states these bounds; the share of other codes reaches half of its own."""
    generator, far = torch.Generator().manual_seed(0), 0.0
    for _ in range(40):
        scale = torch.rand(1, generator=generator).exp2()
        x = (torch.randn(256, 64, generator=generator) * scale).to(dtype)
        other, factor = quantized_by_vllm(x)
        made = ops.quantize_per_tensor(x)
        steps = (other - made.codes.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1
        share = float((steps > 0).float().mean())
        assert share <= codes
        assert float((factor / made.scale - 1).abs()) <= scales
        far = max(far, share)
    assert far >= codes / 2


def test_one_scale_for_a_tensor_counts_every_row():
    x = torch.tensor([[1.0, -2.0], [448.0, 0.0]])
    codes, scale = ops.quantize_per_tensor(x)
    assert (codes.float().tolist(), scale.item()) == ([[1.0, -2.0], [448.0, 0.0]], 1.0)
    x[1, 1] = math.nan
    codes, scale = ops.quantize_per_tensor(x)
    assert bool(codes.float().isnan().all())
    assert math.isnan(scale.item())


def test_decode_of_two_query_tokens():
    """Request 0 has 3 rows, the last two of them new; request 1 is padding."""
    q, cache, lens, requests, table, starts = worked_decode()
    flat = ops.flatten_decode(starts, i32([3, 0]), num_tokens=3)
    assert (flat.seq_lens.tolist(), flat.req_indices.tolist()) == ([2, 3, 0], [0, 0, -1])
    assert torch.equal(flat.seq_lens, lens)
    assert torch.equal(flat.req_indices, requests)
    settings = {"softmax_scale": 1.0, "block_size": 2, "kv_lora_rank": 1}
    out, lse = ops.mla_decode(q, cache, lens, requests, table, starts, **settings)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 3.6, 0.0]))
    torch.testing.assert_close(lse[:2, 0], torch.tensor([4.0, 5.0]).log())
    assert lse[2, 0] == -math.inf


@pytest.mark.parametrize(
    "joined", [lambda q, n: q.flatten(0, 1), lambda q, n: torch.cat([*q[:, :n]])]
)
def test_inductor_loops_over_keys_for_a_number_of_tokens_that_is_an_expression(joined):
    """The loop reads each symbol of a product, and the limit of a number that a tensor holds."""
    q, cache, lens, requests, table, _ = worked_decode()
    tensors = (torch.stack([q] * 5), cache, lens.repeat(5), requests.repeat(5), table)
    settings = {"softmax_scale": 1.0, "block_size": 2, "kv_lora_rank": 1}

    def decode(q, cache, lens, requests, table, count):
        number = count.item()
        torch._check(number <= q.shape[1])
        q = joined(q, number)
        each = lens[: q.shape[0]], requests[: q.shape[0]]
        return ops.mla_decode(q, cache, *each, table, **settings).out

    with dynamo.patch(capture_scalar_outputs=True):
        found = torch.compile(decode, fullgraph=True, dynamic=True)(*tensors, torch.tensor(3))
    torch.testing.assert_close(found.flatten()[:3], torch.tensor([4.0, 3.6, 0.0]))


@pytest.mark.parametrize("value", [1e4, -1e4, 0.0])
def test_logits_of_any_size_and_all_alike(value):
    """The keys fill one step of the loop, exceed it by one key, or exceed two steps by one."""
    count = 2 * KEYS_AT_A_TIME + 1
    cache = torch.full((count, 1, 2), 1.0)
    table = torch.arange(count, dtype=torch.int32)[None]
    q = torch.tensor([[[value, 0.0]]])
    settings = {"softmax_scale": 1.0, "block_size": 1, "kv_lora_rank": 1}
    for length in (KEYS_AT_A_TIME, KEYS_AT_A_TIME + 1, count):
        out, lse = ops.mla_decode(q, cache, i32([length]), i32([0]), table, **settings)
        torch.testing.assert_close(out.flatten(), torch.ones(1))
        torch.testing.assert_close(lse.flatten(), torch.tensor([value + math.log(length)]))


def test_selected_rows_have_their_weights():
    """Rows 1 and 5 have logits 0 and log 3, or equal ones in head 2; sinks are log 12, log 2."""
    _, cache, *_ = worked_decode()
    q = torch.tensor([[[0.0, math.log(3)], [0.0, 0.0]]])
    settings = {"softmax_scale": 1.0, "block_size": 2, "kv_lora_rank": 1}
    out, lse = ops.mla_sparse(q, cache, i32([[3, -1, 2, 0]]), i32([3]), **settings)
    torch.testing.assert_close(out.flatten(), torch.tensor([4.0, 3.0]))
    torch.testing.assert_close(lse.flatten(), torch.tensor([4.0, 2.0]).log())
    lses = torch.stack([lse, torch.tensor([[12.0, 2.0]]).log()])
    torch.testing.assert_close(ops.cp_correct_out(out, lse, lses).out.flatten(), out.new([1, 1.5]))


class MaxNumel(TorchDispatchMode):
    """Records the maximum number of values in a result of an op."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.numel = max(self.numel, result.numel())
        return result


def test_memory_of_a_decode_does_not_grow_with_the_block_table():
    q, cache = torch.randn(2, 4, 40), torch.randn(4, 64, 40)
    token = i32([65, 3]), i32([0, 1])
    settings = {"softmax_scale": 1.0, "block_size": 64, "kv_lora_rank": 24, "layout": "plain"}
    settings |= {"num_splits": 0, "batch_invariant": False}
    found = []
    for columns in (3, 100):
        with MaxNumel() as max_numel:
            table = torch.zeros(2, columns, dtype=torch.int32)
            OPS["mla_decode"].reference(q, cache, *token, table, **settings)
        found.append(max_numel.numel)
    assert found[0] == found[1] == 2 * KEYS_AT_A_TIME * 40
