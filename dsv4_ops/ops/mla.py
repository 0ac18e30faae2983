"""Multi-head latent attention: cache rows, weight absorption, attention to all or selected rows.

The ops serve DeepSeek-V2, V3, V3.2 and R1, Kimi-K2, and GLM-5.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.layout import (
    MLA_LAYOUTS,
    MlaDsFp8Layout,
    MlaFp8Layout,
    PlainLayout,
    mla_layout,
)
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.tiles import PLAN_COLUMNS
from dsv4_ops.core.types import AbsorbedWeights, MlaAttention, PerTensor
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.ops.sparse_mla import check_splits

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""Supported model dtypes."""

PROVIDERS = ("triton", "flash_mla", "reference")


def check_scale(checks: Checks, name: str, scale: Tensor | None, is_used: bool, what: str) -> None:
    """Check a per-tensor scale; it must be None unless the call uses a scale (``is_used``)."""
    if scale is None:
        return
    checks.tensor(name, scale, torch.float32, 1)
    if not is_used:
        checks.without(name, "a tensor", None, what)


def check_cache(checks: Checks, kv_cache: Tensor, block_size: int, layout: str, width: int) -> None:
    """Check a cache whose rows have ``width`` values."""
    checks.at_least(1, block_size=block_size)
    if layout == PlainLayout.tag:
        checks.rows("kv_cache", kv_cache, block_size, dtypes=FLOATS)
        return
    dims = ("num_blocks", "block_size", "row_bytes")
    checks.pages("kv_cache", kv_cache, mla_layout(layout, block_size, width), dims)


_ROWS = "concat_and_cache_mla and gather_and_maybe_dequant_cache of vLLM's MLA, with bounds"
_FP8_LAYOUTS = (MlaFp8Layout.tag, MlaDsFp8Layout.tag)

_mla_insert_kv = define_op(
    "mla",
    "mla_insert_kv(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "Tensor? scale=None, *, int block_size, str layout, str scale_format) -> ()",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens", "num_blocks"),
    source=_ROWS,
)


def mla_insert_kv(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
    *,
    block_size: int,
    layout: str = PlainLayout.tag,
    scale_format: str = "float32",
) -> None:
    """Write the latent and the RoPE part of every token to its slot of the cache.

    Args:
        kv_c: Normed latents, [num_rows, kv_lora_rank], bfloat16, float16 or float32, any strides;
            at least num_tokens rows; extra rows are ignored.
        k_pe: Rotated RoPE parts, [num_rows, rope_dim], the dtype of kv_c.
        kv_cache: Paged cache. "plain": [num_blocks, block_size, kv_lora_rank + rope_dim] of the
            dtype of kv_c, from ``PlainLayout.allocate``. "mla_fp8": the same shape in uint8, from
            ``MlaFp8Layout.allocate``. "mla_ds_fp8": [num_blocks, block_size, 656], uint8, from
            ``MlaDsFp8Layout.allocate``; the latent then has 512 values and the RoPE part 64. Blocks
            may have gaps between them; FP8 blocks must start at multiples of 16 bytes.
        slot_mapping: Slot of every token, block * block_size + row, [num_tokens], int64. Tokens
            whose slot is below 0 or past the last block are skipped.
        scale: Scale of the codes of the layout "mla_fp8", [1], float32; None for 1.
        block_size: Rows per block. At least 1.
        layout: Tag of the cache's layout, "plain", "mla_fp8" or "mla_ds_fp8".
        scale_format: Scales of the layout "mla_ds_fp8": "float32" for amax / 448, or "ue8m0" for
            the smallest power of two that is at least amax / 448 and at least 1e-4.

    Returns:
        Nothing.

    Mutates: ``kv_cache``: only the rows of the slots that the call writes. "plain" rows are copied
        bit for bit. "mla_fp8" rows are e4m3 codes (round to nearest even, saturated) of the values
        divided by ``scale``. "mla_ds_fp8" rows are 512 codes, their 4 float32 scales (one per 128
        codes, at least 2^-126), and the RoPE part in bfloat16. NaN becomes code 0x7F and does not
        affect a scale; an infinity saturates, and affects a scale like the largest finite number of
        its dtype. If two tokens share a slot, the slot may hold a mix of their bytes.

    Raises:
        ValueError: shapes that disagree, a cache that is not of the layout, a scale or a format of
            scales that the layout does not have, ``block_size`` below 1, or several devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the cache; on CUDA a Triton kernel runs inside the
        graph; on a CPU, Inductor generates scatters; dynamic in num_tokens and num_blocks; CUDA
        graphs and export: yes.

    Source: vLLM ``concat_and_cache_mla``; FlashMLA's rows of 656 bytes.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MlaFp8Layout
        >>> kv_cache = MlaFp8Layout(block_size=64, width=16).allocate(num_blocks=1)
        >>> kv_c, k_pe = torch.zeros(1, 8), torch.zeros(1, 8)
        >>> kv_c[0, :4] = torch.tensor([1.0, -3.3, 1000.0, 0.01])
        >>> scale = torch.tensor([0.5])
        >>> dsv4_ops.mla_insert_kv(
        ...     kv_c, k_pe, kv_cache, torch.tensor([1]), scale, block_size=64, layout="mla_fp8"
        ... )
        >>> kv_cache[0, 1, :4].tolist()
        [64, 205, 126, 10]
    """
    tensors = (kv_c, k_pe, kv_cache, slot_mapping, scale)
    settings: dict[str, Any] = {"layout": layout, "scale_format": scale_format}
    checks = Checks("mla_insert_kv")
    checks.one_of("layout", layout, *MLA_LAYOUTS)
    formats = ("float32", "ue8m0") if layout == MlaDsFp8Layout.tag else ("float32",)
    checks.one_of("scale_format", scale_format, *formats, belongs_to=f"layout {layout!r} has")
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_tokens")
    is_tiled = layout == MlaDsFp8Layout.tag
    rank, rope = (MlaDsFp8Layout.kv_lora_rank, 64) if is_tiled else ("kv_lora_rank", "rope_dim")
    checks.tensor("kv_c", kv_c, FLOATS, "num_rows", rank)
    checks.rows_for_tokens("kv_c", kv_c)
    checks.tensor("k_pe", k_pe, kv_c.dtype, "num_rows", rope)
    width = int(kv_c.shape[1]) + int(k_pe.shape[1])
    check_cache(checks, kv_cache, block_size, layout, width)
    if layout == PlainLayout.tag:
        checks.tensor("kv_cache", kv_cache, kv_c.dtype, "num_blocks", "block_size", width)
        checks.apart("kv_cache", kv_cache)
    check_scale(checks, "scale", scale, layout == MlaFp8Layout.tag, f"layout {layout!r}")
    _mla_insert_kv(*tensors, block_size=block_size, **settings)


_mla_gather_kv = define_op(
    "mla",
    "mla_gather_kv(Tensor kv_cache, Tensor slot_mapping, Tensor? scale=None, *, "
    "int block_size, str layout) -> Tensor",
    dynamic=("num_rows", "num_blocks"),
    source=_ROWS,
)


def mla_gather_kv(
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
    *,
    block_size: int,
    layout: str = PlainLayout.tag,
) -> Tensor:
    """Read rows of a cache by slot, as floats.

    Args:
        kv_cache: Paged cache, as for ``mla_insert_kv``.
        slot_mapping: Slot of every row of the result, [num_rows], int64, for example from
            ``token_map`` over context lengths, then ``compressed_slot_mapping``.
        scale: Scale of the codes of the layout "mla_fp8", [1], float32; None for 1.
        block_size: Rows per block. At least 1.
        layout: Tag of the cache's layout, "plain", "mla_fp8" or "mla_ds_fp8".

    Returns:
        [num_rows, width]. Rows of a plain cache keep the cache's dtype and bits. Rows of FP8 caches
        are bfloat16: code * scale in float32, rounded once. Rows whose slot is below 0 or past the
        last block are zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of the layout, a scale that the call
            does not use, ``block_size`` below 1, or several devices.
        TypeError: a dtype other than those above.

    Compile: loads that fuse with their consumers; dynamic in num_rows and num_blocks; CUDA graphs
        and export: yes.

    Source: vLLM ``gather_and_maybe_dequant_cache`` and ``cp_gather_cache``.

    Example:
        >>> import torch, dsv4_ops
        >>> kv_cache = torch.arange(12.0).view(2, 2, 3)
        >>> dsv4_ops.mla_gather_kv(kv_cache, torch.tensor([2, -1, 0]), block_size=2).tolist()
        [[6.0, 7.0, 8.0], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]]
    """
    checks = Checks("mla_gather_kv")
    checks.one_of("layout", layout, *MLA_LAYOUTS)
    _check_gather(checks, kv_cache, slot_mapping, block_size, layout)
    check_scale(checks, "scale", scale, layout == MlaFp8Layout.tag, f"layout {layout!r}")
    return _mla_gather_kv(kv_cache, slot_mapping, scale, block_size=block_size, layout=layout)


def _check_gather(
    checks: Checks, kv_cache: Tensor, slot_mapping: Tensor, block_size: int, layout: str
) -> None:
    width = checks.bytes_of_row("kv_cache", kv_cache) if layout == MlaFp8Layout.tag else 0
    check_cache(checks, kv_cache, block_size, layout, width)
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_rows")


_mla_gather_codes = define_op(
    "mla",
    "mla_gather_codes(Tensor kv_cache, Tensor slot_mapping, *, int block_size, "
    "str layout) -> Tensor",
    dynamic=("num_rows", "num_blocks"),
    source=_ROWS,
    gradient=INTEGERS,
)


def mla_gather_codes(
    kv_cache: Tensor, slot_mapping: Tensor, *, block_size: int, layout: str
) -> Tensor:
    """Read rows of an FP8 cache by slot, as stored bytes.

    With context parallelism, ranks exchange these bytes, which take about half as much memory as
    the values, and decode them with ``mla_dequantize_rows``.

    Args:
        kv_cache: Paged cache, uint8, as for ``mla_insert_kv``.
        slot_mapping: Slot of every row of the result, [num_rows], int64.
        block_size: Rows per block. At least 1.
        layout: Tag of the cache's layout, "mla_fp8" or "mla_ds_fp8".

    Returns:
        uint8 [num_rows, row_bytes]. Rows whose slot is below 0 or past the last block are zero
        bytes, which decode to zeros.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of the layout, ``block_size`` below 1,
            or several devices.
        TypeError: a dtype other than those above.

    Compile: one kernel of masked loads; dynamic in num_rows and num_blocks; CUDA graphs and export:
        yes.

    Source: vLLM ``cp_gather_cache``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MlaDsFp8Layout
        >>> kv_cache = MlaDsFp8Layout(block_size=64).allocate(num_blocks=1)
        >>> kv_cache[0, 3] = 5
        >>> slots = torch.tensor([3, 64])
        >>> codes = dsv4_ops.mla_gather_codes(
        ...     kv_cache, slots, block_size=64, layout="mla_ds_fp8"
        ... )
        >>> codes.shape, codes[:, 0].tolist()
        (torch.Size([2, 656]), [5, 0])
    """
    checks = Checks("mla_gather_codes")
    checks.one_of("layout", layout, *_FP8_LAYOUTS)
    _check_gather(checks, kv_cache, slot_mapping, block_size, layout)
    return _mla_gather_codes(kv_cache, slot_mapping, block_size=block_size, layout=layout)


_mla_dequantize_rows = define_op(
    "mla",
    "mla_dequantize_rows(Tensor codes, Tensor? scale=None, *, str layout) -> Tensor",
    dynamic=("num_rows",),
    source="vLLM cp_gather_and_upconvert_fp8_kv_cache, behind the exchange",
)


def mla_dequantize_rows(codes: Tensor, scale: Tensor | None = None, *, layout: str) -> Tensor:
    """Dequantise the bytes of FP8 rows.

    Args:
        codes: Rows from ``mla_gather_codes``, [num_rows, row_bytes], uint8, any strides.
        scale: Scale of the codes of the layout "mla_fp8", [1], float32; None for 1.
        layout: Tag of the rows' layout, "mla_fp8" or "mla_ds_fp8".

    Returns:
        bfloat16 [num_rows, width]: code * scale in float32, rounded once; the RoPE part of
        "mla_ds_fp8" is copied bit for bit.

    Mutates: nothing.

    Raises:
        ValueError: rows of another layout, a scale that the call does not use, or several devices.
        TypeError: a dtype other than those above.

    Compile: a conversion that fuses with its neighbours; dynamic in num_rows; CUDA graphs and
        export: yes.

    Source: vLLM ``cp_gather_and_upconvert_fp8_kv_cache``.

    Example:
        >>> import torch, dsv4_ops
        >>> codes = torch.tensor([[0x40, 0xCD, 0x7E, 0x0A]], dtype=torch.uint8)
        >>> scale = torch.tensor([0.5])
        >>> dsv4_ops.mla_dequantize_rows(codes, scale, layout="mla_fp8").tolist()
        [[1.0, -3.25, 224.0, 0.009765625]]
    """
    checks = Checks("mla_dequantize_rows")
    checks.one_of("layout", layout, *_FP8_LAYOUTS)
    is_tiled = layout == MlaDsFp8Layout.tag
    row_bytes = MlaDsFp8Layout(1).row_bytes if is_tiled else "row_bytes"
    checks.tensor("codes", codes, torch.uint8, "num_rows", row_bytes)
    check_scale(checks, "scale", scale, not is_tiled, f"layout {layout!r}")
    return _mla_dequantize_rows(codes, scale, layout=layout)


_ABSORPTION = "weight absorption of vLLM's MLACommonImpl"

_mla_absorb_q = define_op(
    "mla",
    "mla_absorb_q(Tensor q_nope, Tensor q_pe, Tensor w_uk_t, Tensor? q_scale=None) -> Tensor",
    dynamic=("num_tokens",),
    source=_ABSORPTION,
)


def mla_absorb_q(
    q_nope: Tensor, q_pe: Tensor, w_uk_t: Tensor, q_scale: Tensor | None = None
) -> Tensor:
    """Project queries into the latent space of the cache rows.

    Args:
        q_nope: Parts of the queries without RoPE, [num_tokens, num_heads, qk_nope_head_dim],
            bfloat16, float16 or float32, any strides.
        q_pe: Rotated RoPE parts of the queries, [num_tokens, num_heads, rope_dim], the dtype of
            q_nope.
        w_uk_t: Up-projection of the keys, [num_heads, qk_nope_head_dim, kv_lora_rank], the dtype of
            q_nope, from ``split_kv_b_proj``.
        q_scale: Scale of the e4m3 codes of the result, [1], float32; None for a result in the dtype
            of q_nope.

    Returns:
        [num_tokens, num_heads, kv_lora_rank + rope_dim]: [q_nope @ w_uk_t | q_pe]; with
        ``q_scale``, float8_e4m3fn codes of these values divided by the scale, saturated.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than those above.

    Compile: a batched product, and one kernel that appends q_pe and quantises; dynamic in
        num_tokens; CUDA graphs and export: yes.

    Source: vLLM's ``MLACommonImpl``: ``W_UK_T``, and the static FP8 query.

    Example:
        >>> import torch, dsv4_ops
        >>> w_uk_t = torch.tensor([[[2.0, 0.0], [1.0, -1.0]]])
        >>> q_nope, q_pe = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])
        >>> dsv4_ops.mla_absorb_q(q_nope, q_pe, w_uk_t)
        tensor([[[ 4., -2.,  3.]]])
    """
    checks = Checks("mla_absorb_q")
    checks.tensor("q_nope", q_nope, FLOATS, "num_tokens", "num_heads", "qk_nope_head_dim")
    checks.tensor("q_pe", q_pe, q_nope.dtype, "num_tokens", "num_heads", "rope_dim")
    dims = ("num_heads", "qk_nope_head_dim", "kv_lora_rank")
    checks.tensor("w_uk_t", w_uk_t, q_nope.dtype, *dims)
    check_scale(checks, "q_scale", q_scale, True, "")
    return _mla_absorb_q(q_nope, q_pe, w_uk_t, q_scale)


_mla_v_up = define_op(
    "mla",
    "mla_v_up(Tensor x, Tensor w_uv) -> Tensor",
    dynamic=("num_tokens",),
    source=_ABSORPTION,
)


def mla_v_up(x: Tensor, w_uv: Tensor) -> Tensor:
    """Project attention outputs from the latent space to the values of every head.

    Args:
        x: Output of ``mla_decode``, [num_tokens, num_heads, kv_lora_rank], bfloat16, float16 or
            float32, any strides.
        w_uv: Up-projection of the values, [num_heads, kv_lora_rank, v_head_dim], the dtype of x,
            from ``split_kv_b_proj``.

    Returns:
        [num_tokens, num_heads * v_head_dim], the dtype of x: the input of the output projection.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than those above.

    Compile: a batched product and a transposed copy, which fuses with its consumer; dynamic in
        num_tokens; CUDA graphs and export: yes.

    Source: vLLM's ``MLACommonImpl._v_up_proj``.

    Example:
        >>> import torch, dsv4_ops
        >>> x, w_uv = torch.tensor([[[3.25, 0.5]]]), torch.tensor([[[3.0], [1.0]]])
        >>> dsv4_ops.mla_v_up(x, w_uv).tolist()
        [[10.25]]
    """
    checks = Checks("mla_v_up")
    checks.tensor("x", x, FLOATS, "num_tokens", "num_heads", "kv_lora_rank")
    checks.tensor("w_uv", w_uv, x.dtype, "num_heads", "kv_lora_rank", "v_head_dim")
    return _mla_v_up(x, w_uv)


_mla_expand_kv = define_op(
    "mla",
    "mla_expand_kv(Tensor kv_c, Tensor w_kv_b, Tensor num_valid) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_rows",),
    source=_ABSORPTION,
)


def mla_expand_kv(kv_c: Tensor, w_kv_b: Tensor, num_valid: Tensor) -> Tensor:
    """Expand the valid latent rows into keys and values.

    A chunk of contexts has a fixed size, but its unused rows are not multiplied.

    Args:
        kv_c: Normed latents, [num_rows, kv_lora_rank], bfloat16, float16 or float32, any strides.
        w_kv_b: Weight of ``kv_b_proj``, [num_heads, width, kv_lora_rank], the dtype of kv_c, any
            strides; width is qk_nope_head_dim + v_head_dim.
        num_valid: Number of leading rows to expand, [1], int32, clamped to 0..num_rows.

    Returns:
        [num_rows, num_heads, width], the dtype of kv_c: each row times the weight of every head; 0
        from row num_valid on, even if kv_c has NaN there.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than those above.

    Compile: on CUDA a Triton kernel inside the graph; on a CPU, a matrix product and a select;
        dynamic in num_rows; CUDA graphs and export: yes.

    Source: vLLM ``MLACommonImpl._compute_prefill_context``.

    Example:
        >>> import torch, dsv4_ops
        >>> kv_c, w_kv_b = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[[1.0, -1.0]]])
        >>> dsv4_ops.mla_expand_kv(kv_c, w_kv_b, torch.tensor([1]).int()).tolist()
        [[[-1.0]], [[0.0]]]
    """
    checks = Checks("mla_expand_kv")
    checks.tensor("kv_c", kv_c, FLOATS, "num_rows", "kv_lora_rank")
    checks.tensor("w_kv_b", w_kv_b, kv_c.dtype, "num_heads", "width", "kv_lora_rank")
    checks.tensor("num_valid", num_valid, torch.int32, 1)
    return _mla_expand_kv(kv_c, w_kv_b, num_valid)


_quantize_per_tensor = define_op(
    "mla",
    "quantize_per_tensor(Tensor x) -> (Tensor codes, Tensor scale)",
    dynamic=("num_tokens",),
    source="vLLM dynamic_per_batched_tensor_quant",
)


def quantize_per_tensor(x: Tensor) -> PerTensor:
    """Quantise a tensor to e4m3 with one scale, computed from its amax.

    Every value affects the scale: a NaN in a padding row makes all results NaN, and the codes of a
    token depend on the other tokens of the batch. A fixed ``q_scale`` of ``mla_absorb_q`` avoids
    both effects.

    Scale and products are float32. vLLM rounds both to the dtype of x. For bfloat16, up to 8 % of
    vLLM's codes differ from ours by one step, and vLLM's scale differs by a factor of up to 1 +
    2^-7. For float32, codes and scale agree.

    Args:
        x: Values, [num_tokens, ...], bfloat16, float16 or float32, any strides.

    Returns:
        codes: float8_e4m3fn in the shape of x: x * (448 / amax), where amax is at least 1e-10.
        scale: Scale of the codes, [1], float32.

    Mutates: nothing.

    Raises:
        ValueError: a scalar.
        TypeError: a dtype other than those above.

    Compile: a reduction and a pointwise kernel; dynamic in num_tokens; CUDA graphs and export: yes.

    Source: vLLM ``dynamic_per_batched_tensor_quant``, but in float32.

    Example:
        >>> import torch, dsv4_ops
        >>> codes, scale = dsv4_ops.quantize_per_tensor(torch.tensor([-2.0, 1.0]))
        >>> codes.float().tolist(), round(scale.item(), 8)
        ([-448.0, 224.0], 0.00446429)
    """
    checks = Checks("quantize_per_tensor")
    checks.floats("x", x, *FLOATS)
    checks.rows_of("x", x, "num_tokens")
    return PerTensor(*_quantize_per_tensor(x))


def split_kv_b_proj(
    weight: Tensor | torch.nn.Module,
    scale: Tensor | None = None,
    *,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype | None = None,
) -> AbsorbedWeights:
    """Split ``kv_b_proj`` into the weights of ``mla_absorb_q`` and ``mla_v_up``.

    Call this function once, and again after new weights are loaded.

    Args:
        weight: [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], one row per output
            feature; or a linear layer with a weight of this shape. A layer other than ``nn.Linear``
            is applied to an identity matrix to get the weight.
        scale: Block scales of a float8_e4m3fn weight, [row_blocks, column_blocks], float32; blocks
            are 128 x 128, smaller at the edges. None for a weight without scales.
        num_heads: Heads of this rank.
        qk_nope_head_dim: Width of the keys' part without RoPE.
        v_head_dim: Width of the values.
        dtype: Dtype of the results; None means the dtype of the weight, or bfloat16 for a
            float8_e4m3fn weight.

    Returns:
        w_uk_t: [num_heads, qk_nope_head_dim, kv_lora_rank], dense.
        w_uv: [num_heads, kv_lora_rank, v_head_dim], dense.

    Raises:
        ValueError: a weight or scales of other sizes.
        TypeError: a weight that is neither tensor nor module, or an unsupported dtype.

    Example:
        >>> import torch, dsv4_ops
        >>> weight = torch.tensor([[2.0, 0.0], [1.0, -1.0], [3.0, 1.0]])
        >>> w_uk_t, w_uv = dsv4_ops.split_kv_b_proj(
        ...     weight, num_heads=1, qk_nope_head_dim=2, v_head_dim=1
        ... )
        >>> w_uk_t.tolist(), w_uv.tolist()
        ([[[2.0, 0.0], [1.0, -1.0]]], [[[3.0], [1.0]]])
    """
    op = "split_kv_b_proj"
    checks = Checks(op)
    sizes = {"num_heads": num_heads, "qk_nope_head_dim": qk_nope_head_dim, "v_head_dim": v_head_dim}
    checks.at_least(1, **sizes)
    if dtype is not None and dtype not in FLOATS:
        raise argument_error(
            op,
            "dtype",
            must="be None or " + " or ".join([str(each) for each in FLOATS]),
            got=dtype,
            do="Pass the dtype of the model",
            kind=TypeError,
        )
    num_rows = num_heads * (qk_nope_head_dim + v_head_dim)
    if isinstance(weight, torch.nn.Module):
        _check_no_scale(checks, scale, "a module")
        weight = _multiplied_with(weight, dtype)
    if not isinstance(weight, Tensor):
        raise argument_error(
            op,
            "weight",
            must="be a tensor or a module",
            got=type(weight).__name__,
            do="Pass kv_b_proj or its weight",
            kind=TypeError,
        )
    checks.tensor("weight", weight, weight.dtype, num_rows, "kv_lora_rank")
    if weight.dtype == torch.float8_e4m3fn:
        weight = _dequantized(checks, weight, scale)
        dtype = dtype or torch.bfloat16
    else:
        _check_no_scale(checks, scale, f"a weight of {weight.dtype}")
    heads = weight.detach().unflatten(0, (num_heads, -1)).to(dtype or weight.dtype)
    w_uk_t, w_uv = heads.split([qk_nope_head_dim, v_head_dim], 1)
    return AbsorbedWeights(w_uk_t.contiguous(), w_uv.transpose(1, 2).contiguous())


def _check_no_scale(checks: Checks, scale: Tensor | None, partner: str) -> None:
    if scale is not None:
        checks.without("scale", "a tensor", None, partner)


def _multiplied_with(layer: torch.nn.Module, dtype: torch.dtype | None) -> Tensor:
    """Return the weight by which ``layer`` multiplies, regardless of its storage format."""
    if type(layer) is torch.nn.Linear:
        return layer.weight
    stored = next(itertools.chain(layer.parameters(), layer.buffers()), None)
    device = None if stored is None else stored.device
    is_float = stored is not None and stored.dtype in FLOATS
    kind = dtype or (stored.dtype if stored is not None and is_float else torch.bfloat16)
    size: Any = layer.in_features  # every linear layer has this attribute
    identity = torch.eye(int(size), dtype=kind, device=device)
    with torch.no_grad():
        product: Tensor = layer(identity)
        bias = getattr(layer, "bias", None)
        return (product if bias is None else product - bias).t()


_SCALE_BLOCK = 128
"""Rows and columns of a weight that share a scale in DeepSeek's checkpoints."""


def _dequantized(checks: Checks, weight: Tensor, scale: Tensor | None) -> Tensor:
    values = weight.to(torch.float32)
    if scale is None:
        return values
    blocks = [-(-int(size) // _SCALE_BLOCK) for size in weight.shape]
    checks.tensor("scale", scale, torch.float32, *blocks)
    for axis, size in enumerate(weight.shape):
        scale = scale.repeat_interleave(_SCALE_BLOCK, axis).narrow(axis, 0, size)
    return values * scale


def _check_attention(
    checks: Checks,
    tensors: dict[str, Any],
    softmax_scale: float,
    impl: str,
    arguments: dict[str, Any],
) -> None:
    """Check the queries, cache and settings of an attention to latent rows."""
    q, kv_cache, layout = tensors["q"], tensors["kv_cache"], arguments["layout"]
    codes = (torch.float8_e4m3fn,) if layout == MlaFp8Layout.tag else ()
    checks.floats("q", q, *FLOATS, *codes, do="Pass the result of mla_absorb_q")
    checks.tensor("q", q, q.dtype, "num_tokens", "num_heads", "width")
    width = int(q.shape[2])  # a configured size: a constant in compiled code
    kv_lora_rank = arguments["kv_lora_rank"]
    checks.at_least(1, kv_lora_rank=kv_lora_rank)
    checks.at_most("kv_lora_rank", kv_lora_rank, "the width of q", width)
    if layout == MlaDsFp8Layout.tag:
        checks.tensor("q", q, q.dtype, "num_tokens", "num_heads", MlaDsFp8Layout.width)
        rank = MlaDsFp8Layout.kv_lora_rank
        checks.equal("kv_lora_rank", kv_lora_rank, rank, f"layout {layout!r}")
    check_splits(checks, arguments["num_splits"], arguments["batch_invariant"])
    checks.above(0, softmax_scale=softmax_scale)
    check_cache(checks, kv_cache, arguments["block_size"], layout, width)
    check_impl(checks.op, PROVIDERS, impl, q.device, {**tensors, **arguments})
    if layout == PlainLayout.tag:
        checks.tensor("kv_cache", kv_cache, q.dtype, "num_blocks", "block_size", "width")


_mla_decode = define_op(
    "mla",
    "mla_decode(Tensor q, Tensor kv_cache, Tensor seq_lens, Tensor req_indices, "
    "Tensor block_table, Tensor? query_start_loc=None, Tensor? plan=None, "
    "Tensor? q_scale=None, Tensor? kv_scale=None, *, float softmax_scale, int block_size, "
    "int kv_lora_rank, str layout, int num_splits, bool batch_invariant, "
    'str impl="auto") -> (Tensor out, Tensor lse)',
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens", "num_blocks", "num_reqs", "max_blocks"),
    source="decode of vLLM's MLA common layer, with bounds and the tokens of requests ragged",
    providers=PROVIDERS,
    hopper_call="_hopper_mla_decode",
)


def mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor | None = None,
    plan: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_scale: Tensor | None = None,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int = 512,
    layout: str = PlainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> MlaAttention:
    """Attend with absorbed queries to the latent rows of a paged cache.

    All heads share the row of a position: the whole row is the key, and its first ``kv_lora_rank``
    values are the value. A request may have any number of tokens. Each token has its own length, so
    there is no causal mask.

    Args:
        q: Queries from ``mla_absorb_q``, [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim],
            bfloat16, float16 or float32, any strides; for the layout "mla_fp8", float8_e4m3fn is
            allowed too.
        kv_cache: Paged rows from ``mla_insert_kv``. "plain": [num_blocks, block_size, width] of the
            dtype of q. "mla_fp8": [num_blocks, block_size, width], uint8. "mla_ds_fp8":
            [num_blocks, block_size, 656], uint8. Blocks may have gaps between them; FP8 blocks must
            start at multiples of 16 bytes.
        seq_lens: Number of rows of the request that each token sees, including the token's own row,
            [num_tokens], int32, from ``flatten_decode`` with ``compress_ratio=1``. 0 or less for
            padding. Rows past the block table or on absent blocks are skipped.
        req_indices: Request of every token, [num_tokens], int32; a token of an absent request sees
            no row.
        block_table: Physical block of every (request, logical block), [num_reqs, max_blocks],
            int32, any strides.
        query_start_loc: First token of every request, [num_reqs + 1], int32: a hint that lets the
            tokens of a request share reads of its rows. Results do not depend on this hint.
        plan: Work tiles, [num_tiles, 4], int32, from ``sparse_mla_plan(seq_lens, None)`` for the
            same number of tokens and heads. With None, the call chooses the splits. The lengths
            that the plan was made from affect only the speed. A tensor that is not such a plan
            gives undefined results, but no access out of bounds.
        q_scale: Scale of the e4m3 codes of q, [1], float32; None for 1.
        kv_scale: Scale of the codes of the layout "mla_fp8", [1], float32; None for 1.
        softmax_scale: Scale of q . row. Above 0.
        block_size: Rows per block. At least 1.
        kv_lora_rank: Values of the latent, at most the width of q; 512 for "mla_ds_fp8".
        layout: Tag of the cache's layout, "plain", "mla_fp8" or "mla_ds_fp8".
        num_splits: Number of splits of a token's rows; 0 derives it from the batch or the plan. At
            least 0, and 0 with a plan.
        batch_invariant: Whether only the table's width decides the splits if num_splits is 0. A
            token's result then has the same bits regardless of the other tokens in the batch.
            ``plan`` must then be None.
        impl: Implementation: "triton" (our kernels), "flash_mla" (plain bfloat16 or float16 rows of
            576 values in blocks of 64), or "reference" (the definition). "auto" runs our kernels on
            CUDA and the reference elsewhere.

    Returns:
        out: [num_tokens, num_heads, kv_lora_rank], the dtype of q, or bfloat16 if q is e4m3; 0 for
            tokens without a row, such as padding.
        lse: Natural logarithm of the sum of exp(logit), [num_tokens, num_heads], float32; -inf if
            the token has no row.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of the layout, a scale that the call
            does not use, a number out of range, or several devices.
        TypeError: a dtype other than those above.
        NotImplementedError: ``impl`` does not support the call.
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: on CUDA our kernels (on Hopper as one opaque call, because Inductor cannot compile
        Gluon); elsewhere gathers and products. Dynamic in num_tokens, num_reqs, max_blocks and the
        blocks of the cache; CUDA graphs and export: yes.

    Source: the decode of vLLM's ``MLACommonImpl``. The lse of a token without rows is -inf here,
        +inf in FlashMLA.

    Example:
        >>> import math, torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> kv_cache = PlainLayout(block_size=2, width=2, dtype=torch.float32).allocate(2)
        >>> kv_cache[1] = torch.tensor([[1.0, 0.0], [5.0, 1.0]])
        >>> q = torch.tensor([[[0.0, math.log(3)]]])
        >>> out, lse = dsv4_ops.mla_decode(
        ...     q, kv_cache, torch.tensor([2]).int(), torch.tensor([0]).int(),
        ...     torch.tensor([[1]]).int(), softmax_scale=1.0, block_size=2, kv_lora_rank=1,
        ... )
        >>> round(out.item(), 4), round(lse.exp().item(), 4)  # (1 * 1 + 3 * 5) / 4
        (4.0, 4.0)
    """
    arguments: dict[str, Any] = {"block_size": block_size, "kv_lora_rank": kv_lora_rank}
    arguments |= {"layout": layout, "num_splits": num_splits, "batch_invariant": batch_invariant}
    checks = Checks("mla_decode")
    checks.one_of("layout", layout, *MLA_LAYOUTS)
    tensors = {"q": q, "kv_cache": kv_cache, "plan": plan}
    _check_attention(checks, tensors, softmax_scale, impl, arguments)
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_tokens")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.optional("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    if plan is not None:
        checks.tensor("plan", plan, torch.int32, "num_tiles", PLAN_COLUMNS)
        checks.rows_for_tokens("plan", plan)
        checks.without("num_splits", num_splits, 0, "a plan")
        checks.without("batch_invariant", batch_invariant, False, "a plan")
    is_coded = q.dtype == torch.float8_e4m3fn
    check_scale(checks, "q_scale", q_scale, is_coded, f"a q of {q.dtype}")
    check_scale(checks, "kv_scale", kv_scale, layout == MlaFp8Layout.tag, f"layout {layout!r}")
    rows = (q, kv_cache, seq_lens, req_indices, block_table, query_start_loc)
    settings = {"softmax_scale": softmax_scale, "impl": impl, **arguments}
    return MlaAttention(*_mla_decode(*rows, plan, q_scale, kv_scale, **settings))


SPARSE_LAYOUTS = (PlainLayout.tag, MlaDsFp8Layout.tag)
"""Layouts whose rows ``mla_sparse`` reads."""

_mla_sparse = define_op(
    "mla",
    "mla_sparse(Tensor q, Tensor kv_cache, Tensor indices, Tensor lens, *, float softmax_scale, "
    "int block_size, int kv_lora_rank, str layout, int num_splits, bool batch_invariant, "
    'str impl="auto") -> (Tensor out, Tensor lse)',
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens", "num_blocks", "topk"),
    source="DeepSeek-V3.2's sparse attention; FlashMLA's sparse decode and prefill of 576 values",
    providers=PROVIDERS,
    hopper_call="_hopper_mla_decode",
)


def mla_sparse(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    *,
    softmax_scale: float,
    block_size: int,
    kv_lora_rank: int = 512,
    layout: str = PlainLayout.tag,
    num_splits: int = 0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> MlaAttention:
    """Attend with absorbed queries to selected latent rows of a paged cache.

    This is ``mla_decode`` over the rows that an indexer selected, for decodes and prefills: every
    token has its own row of ``indices``. ``indices`` holds slots, so the op reads no block table,
    and layers that share a selection take the same ``indices``.

    The models that this op serves have no attention sinks. To add one sink logit per head, stack
    ``lse`` and the sinks into ``lses``: ``cp_correct_out(out, lse, lses).out`` is the output.

    Args:
        q: Queries from ``mla_absorb_q``, [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim],
            bfloat16, float16 or float32, any strides.
        kv_cache: Paged rows from ``mla_insert_kv``. "plain": [num_blocks, block_size, width] of the
            dtype of q. "mla_ds_fp8": [num_blocks, block_size, 656], uint8. Blocks may have gaps
            between them; FP8 blocks must start at multiples of 16 bytes.
        indices: Slots of the selected rows, block * block_size + row, [num_tokens, topk], int32,
            any strides, from ``indexer_select`` with ``slots`` if the indexer cache has the same
            blocks as ``kv_cache``; topk is at least 1. Slots that do not exist, such as -1, are
            skipped; a slot that is listed twice is attended to twice.
        lens: Number of leading entries of ``indices`` to use, [num_tokens], int32: 0 or less means
            none, more than ``topk`` means all, so you may pass the length of the token's context.
        softmax_scale: Scale of q . row. Above 0.
        block_size: Rows per block. At least 1.
        kv_lora_rank: Values of the latent, at most the width of q; 512 for "mla_ds_fp8".
        layout: Tag of the cache's layout, "plain" or "mla_ds_fp8".
        num_splits: Number of splits of a token's rows; 0 derives it from the batch. At least 0.
        batch_invariant: Whether only topk decides the splits if num_splits is 0. A token's result
            then has the same bits regardless of the other tokens in the batch.
        impl: Implementation: "triton" (our kernels), "flash_mla", or "reference" (the definition).
            "auto" runs our kernels on CUDA and the reference elsewhere. FlashMLA rounds the scales
            of "mla_ds_fp8" to bfloat16, which changes no power of two (``scale_format="ue8m0"``).

    Returns:
        out: [num_tokens, num_heads, kv_lora_rank], the dtype of q; 0 for tokens without a row, such
            as padding.
        lse: Natural logarithm of the sum of exp(logit), [num_tokens, num_heads], float32; -inf if
            the token has no row.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a cache that is not of the layout, a number out of range,
            or several devices.
        TypeError: a dtype other than those above.
        NotImplementedError: ``impl`` does not support the call: FlashMLA takes 64 or 128 heads,
            bfloat16 queries of 576 values, plain blocks without gaps, and over "mla_ds_fp8" up to
            8192 tokens.
        ImportError, RuntimeError: ``impl`` is not available here; the message says why.

    Compile: as ``mla_decode``; dynamic in num_tokens, topk and the blocks of the cache; CUDA graphs
        and export: yes.

    Source: DeepSeek-V3.2's attention; FlashMLA's ``flash_mla_with_kvcache`` with ``indices``, and
        ``flash_mla_sparse_fwd``.

    Example:
        >>> import math, torch, dsv4_ops
        >>> from dsv4_ops.core.layout import PlainLayout
        >>> kv_cache = PlainLayout(block_size=2, width=2, dtype=torch.float32).allocate(2)
        >>> kv_cache[1] = torch.tensor([[1.0, 0.0], [5.0, 1.0]])
        >>> q = torch.tensor([[[0.0, math.log(3)]]])
        >>> out, lse = dsv4_ops.mla_sparse(
        ...     q, kv_cache, torch.tensor([[2, -1, 3]]).int(), torch.tensor([9]).int(),
        ...     softmax_scale=1.0, block_size=2, kv_lora_rank=1,
        ... )
        >>> round(out.item(), 4), round(lse.exp().item(), 4)  # (1 * 1 + 3 * 5) / 4
        (4.0, 4.0)
    """
    arguments: dict[str, Any] = {"block_size": block_size, "kv_lora_rank": kv_lora_rank}
    arguments |= {"layout": layout, "num_splits": num_splits, "batch_invariant": batch_invariant}
    checks = Checks("mla_sparse")
    checks.one_of("layout", layout, *SPARSE_LAYOUTS)
    _check_attention(checks, {"q": q, "kv_cache": kv_cache}, softmax_scale, impl, arguments)
    checks.tensor("indices", indices, torch.int32, "num_tokens", "topk")
    checks.at_least(1, topk=indices.shape[1])
    checks.tensor("lens", lens, torch.int32, "num_tokens")
    settings = {"softmax_scale": softmax_scale, "impl": impl, **arguments}
    return MlaAttention(*_mla_sparse(q, kv_cache, indices, lens, **settings))
