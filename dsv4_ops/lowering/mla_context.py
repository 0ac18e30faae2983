"""Lowerings of attention over chunked contexts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4_ops.lowering.kinds import Choices
from dsv4_ops.reference import mla_context as reference
from dsv4_ops.reference.common import query_lens


def _mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    cu_seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """On the CPU, run torch's flash attention; on other devices, run the reference. Flash attention
    stores no logits: only the mask has a value for every token and key. Its inputs are float32,
    because in bfloat16 torch approximates exp, and the log-sum-exp is wrong in the fifth digit."""
    if q.device.type != "cpu":
        tensors = q, k_nope, k_pe, v, query_start_loc, cu_seq_lens
        return reference.mla_prefill(*tensors, softmax_scale=softmax_scale, causal=causal)
    num_k = v.shape[0]
    req_indices, query = torch.ops.dsv4_ops.token_map.default(
        query_start_loc, query_lens(query_start_loc), num_tokens=q.shape[0]
    )
    bounds = reference.visible_keys(req_indices, query, query_start_loc, cu_seq_lens, num_k, causal)
    k = torch.cat([k_nope, k_pe[:, None].expand(-1, k_nope.shape[1], -1)], 2)
    start, stop = bounds
    numbers = [each.isfinite().all(2) for each in (k, v)]
    of_k, of_v = (reference.sees_any(~each, start, stop) for each in numbers)
    k, values = (
        torch.where(number[..., None], each, 0.0)
        for each, number in zip((k, v), numbers, strict=True)
    )
    mask = torch.where(reference.visible(*bounds, num_k), 0.0, -torch.inf)  # in the default dtype
    width = max(int(q.shape[2]), int(v.shape[2]))
    # two more rows, which are masked: Inductor compiles a graph for one row and one for more
    heads_first = [
        pad(each.to(torch.float32), (0, width - each.shape[2], 0, 0, 0, 2))
        .transpose(0, 1)
        .contiguous()[None]
        for each in (q, k, values)
    ]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        *heads_first,
        attn_mask=pad(mask.to(torch.float32), (0, 2, 0, 2), value=-torch.inf),
        scale=softmax_scale,
    )
    out, lse = out[0, :, :-2].transpose(0, 1)[:, :, : v.shape[2]], lse[0, :, :-2].transpose(0, 1)
    sees = (start < stop)[:, None]
    out = torch.where((of_k | of_v)[..., None], torch.nan, torch.where(sees[..., None], out, 0.0))
    return out.to(q.dtype), torch.where(of_k, torch.nan, torch.where(sees, lse, -torch.inf))


mla_prefill = Choices(_mla_prefill)
