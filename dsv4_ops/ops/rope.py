"""Rotary embeddings, and the op that normalises and rotates queries and inserts keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.types import QuantizedGroups
from dsv4_ops.core.yarn import YarnScaling
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.reference import rope as reference

ROPE_DIM = MainLayout.head_dim - MainLayout.code_dim
"""Rotated values per key."""

SCALE_LAYOUTS = ("row", "column_padded", "ue8m0_packed")

_DIMENSIONS = ("num_tokens", "num_positions")


def rope_cos_sin_cache(
    num_positions: int,
    *,
    theta: float,
    rope_dim: int = ROPE_DIM,
    scaling: YarnScaling | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Compute the cosines and sines of the angles of every position.

    Ops take the table as ``cos_sin_cache``. Call this host function once per table: DeepSeek-V4 has
    one table for layers with a window only (theta 10000) and one table for layers with a compressor
    (theta 160000, YaRN).

    Args:
        num_positions: Rows of the table. At least 0.
        theta: Base of the frequencies: pair i rotates by theta^(-2 i / rope_dim) per position.
            Above 1.
        rope_dim: Rotated values per row, an even number. At least 2.
        scaling: ``YarnScaling`` for contexts longer than in training, or None.
        device: Device of the table; None for the CPU.

    Returns:
        [num_positions, rope_dim] float32: the cosines of all pairs, then their sines. Angles are
        computed on the CPU in float64, so that the table is the same on every machine and accurate
        at position one million.

    Mutates: nothing.

    Raises:
        ValueError: a size or a number out of range, or no such device.
        TypeError: an argument of another type.

    Compile: the function is not an op; call it outside of compiled code.

    Source: DeepSeek-V4's configuration; YaRN (Peng et al., 2023) without its attention scaling.

    Example:
        >>> import torch, dsv4_ops
        >>> dsv4_ops.rope_cos_sin_cache(2, theta=10000.0, rope_dim=4)
        tensor([[1.0000, 1.0000, 0.0000, 0.0000],
                [0.5403, 0.9999, 0.8415, 0.0100]])
    """
    checks = Checks("rope_cos_sin_cache")
    checks.at_least(0, num_positions=num_positions)
    checks.at_least(2, rope_dim=rope_dim)
    checks.divides("values of a pair", 2, "rope_dim", rope_dim)
    checks.above(1, theta=theta)
    checks.instance("scaling", scaling, YarnScaling)
    checks.device_name("device", device)
    return reference.rope_cos_sin_cache(
        num_positions, theta=theta, rope_dim=rope_dim, scaling=scaling, device=device
    )


_apply_rope = define_op(
    "rope",
    "apply_rope(Tensor x, Tensor positions, Tensor cos_sin_cache, *, bool inverse, "
    "bool rope_first=False, bool interleaved=True) -> Tensor",
    dynamic=(*_DIMENSIONS, "num_heads"),
    source="DeepSeek's rotary embeddings of a part of a row",
)


def apply_rope(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    inverse: bool = False,
    rope_first: bool = False,
    interleaved: bool = True,
) -> Tensor:
    """Rotate a part of every row, forward or back, by the angles of its position.

    Args:
        x: Rows, [num_tokens, dim] or [num_tokens, num_heads, dim], bfloat16 or float32, any
            strides.
        positions: Absolute position of every token, [num_tokens], int64. Rows at positions below 0
            or past the end of the table are not changed.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; rope_dim is
            even and at most dim.
        inverse: Whether to rotate by the negative angles.
        rope_first: Whether the first rope_dim values of a row are rotated (indexers of
            DeepSeek-V3.2 and GLM-5) rather than the last.
        interleaved: Whether rotated values 2 i and 2 i + 1 form pair i. If False, values i and i +
            rope_dim / 2 form pair i, as in DeepSeek-V3.2's indexer.

    Returns:
        A tensor like ``x``, dense. Pair i is rotated by angle i, in float32, with every product
        rounded before the sum and one cast at the end. Other values are copied.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, or several devices.
        TypeError: a dtype other than those above.

    Compile: Inductor generates one loop, which fuses with its neighbours; on a GPU, a product and
        the sum may become one FMA, within float32 rounding; dynamic in num_tokens, num_heads and
        num_positions; CUDA graphs and export: yes.

    Source: the rotary embeddings of DeepSeek-V4 and of DeepSeek-V3.2's indexer; cosines and sines
        are not rounded to bfloat16.

    Example:
        >>> import torch, dsv4_ops
        >>> cos_sin_cache = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # no turn, a quarter turn
        >>> x = torch.tensor([[5.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
        >>> dsv4_ops.apply_rope(x, torch.tensor([0, 1]), cos_sin_cache)
        tensor([[ 5.,  1.,  2.],
                [ 5., -2.,  1.]])
        >>> dsv4_ops.apply_rope(x, torch.tensor([0, 1]), cos_sin_cache, rope_first=True)
        tensor([[ 5.,  1.,  2.],
                [-1.,  5.,  2.]])
    """
    checks = Checks("apply_rope")
    settings: dict[str, Any] = {"inverse": inverse, "rope_first": rope_first}
    settings |= {"interleaved": interleaved}
    for name, value in settings.items():
        checks.flag(name, value)
    checks.floats("x", x, torch.bfloat16, torch.float32)
    heads = ("num_heads",) if x.dim() == 3 else ()
    checks.tensor("x", x, x.dtype, "num_tokens", *heads, "dim")
    checks.rotation(positions, cos_sin_cache, "rope_dim")
    checks.even("cos_sin_cache", cos_sin_cache, "dim", x.shape[-1])
    return _apply_rope(x, positions, cos_sin_cache, **settings)


_inverse_rope_group = define_op(
    "rope",
    "inverse_rope_group(Tensor o, Tensor positions, Tensor cos_sin_cache, *, "
    "int num_groups) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=_DIMENSIONS,
    source="DeepSeek-V4 inverse rotation before the grouped output projection",
)
_inverse_rope_group_quantize = define_op(
    "rope",
    "inverse_rope_group_quantize(Tensor o, Tensor positions, Tensor cos_sin_cache, *, "
    "int num_groups, str scale_layout) -> (Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=_DIMENSIONS,
    source="vLLM 0.33 fused inverse RoPE and FP8 quantisation of the attention output",
)


def inverse_rope_group(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int
) -> Tensor:
    """Undo the rotation of the attention output, and lay its heads out in groups.

    In DeepSeek-V4's attention, the values are the rotated keys, so the output depends on the
    positions of the keys. After inverse RoPE by the position of the query, the output depends on
    distances only. ``sparse_mla_decode`` applies inverse RoPE to its own output if it gets
    ``positions`` and ``cos_sin_cache``.

    Args:
        o: Attention output, [num_tokens, num_heads, dim], bfloat16, any strides.
        positions: Absolute position of every query, [num_tokens], int64. Rows at positions below 0
            or past the end of the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; rope_dim is
            even and at most dim.
        num_groups: Groups of heads; divides num_heads. At least 1.

    Returns:
        [num_tokens, num_groups, num_heads / num_groups * dim] bfloat16, dense: the heads of every
        group side by side, each head after ``apply_rope(..., inverse=True)``.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``num_groups`` that does not divide num_heads, or several
            devices.
        TypeError: a dtype other than those above.

    Compile: on a GPU one kernel of ours if the number of values per head is a power of two up to
        1024, otherwise one loop that Inductor generates; dynamic in num_tokens and num_positions;
        CUDA graphs and export: yes.

    Source: DeepSeek-V4's output projection.

    Example:
        >>> import torch, dsv4_ops
        >>> cos_sin_cache = torch.tensor([[0.0, 1.0]])  # a quarter turn
        >>> o = torch.tensor([[[5.0, -2.0, 1.0]] * 4], dtype=torch.bfloat16)
        >>> dsv4_ops.inverse_rope_group(o, torch.tensor([0]), cos_sin_cache, num_groups=2).tolist()
        [[[5.0, 1.0, 2.0, 5.0, 1.0, 2.0], [5.0, 1.0, 2.0, 5.0, 1.0, 2.0]]]
    """
    checks = Checks("inverse_rope_group")
    _check_groups(checks, o, positions, cos_sin_cache, "dim", num_groups)
    return _inverse_rope_group(o, positions, cos_sin_cache, num_groups=num_groups)


def inverse_rope_group_quantize(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, num_groups: int, scale_layout: str
) -> QuantizedGroups:
    """Apply ``inverse_rope_group`` and quantise the result to FP8.

    There is one scale per 128 values, as grouped matrix products need.

    Args:
        o: Attention output, [num_tokens, num_heads, 512], bfloat16, any strides.
        positions: Absolute position of every query, [num_tokens], int64, as for
            ``inverse_rope_group``.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, rope_dim], float32; rope_dim is
            even and at most 512.
        num_groups: Groups of heads; divides num_heads. At least 1.
        scale_layout: Layout of the scales: "row", "column_padded" (DeepGEMM on SM90) or
            "ue8m0_packed" (DeepGEMM on SM100).

    Returns:
        ``QuantizedGroups(values, scales)``, dense:

        - values, float8_e4m3fn [num_groups, num_tokens, width], where width is num_heads /
          num_groups * 512: the bfloat16 result of ``inverse_rope_group`` divided by the scale of
          its block, rounded to nearest even. The scale of a block is the smallest power of two, at
          least 2^-42, for which amax / scale is at most 448. NaN becomes code 0x7F and does not
          affect the scale; an infinity saturates, and affects the scale like the largest bfloat16.
        - scales. "row": float32 [num_groups, num_tokens, width / 128]. "column_padded": float32
          [num_groups, width / 128, padded_tokens]. "ue8m0_packed": int32 [num_groups, width / 512,
          padded_tokens], where each number packs the four UE8M0 bytes of a head, the first byte
          lowest. padded_tokens is a multiple of 4, and padding is 0. For the last two layouts,
          ``scales.permute(2, 0, 1)[:num_tokens]`` is the view with a token stride of 1 that
          DeepGEMM takes.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``num_groups`` that does not divide num_heads, an unknown
            ``scale_layout``, or several devices.
        TypeError: a dtype other than those above.

    Compile: on a GPU one kernel of ours; on a CPU, Inductor generates one reduction, and a copy of
        the scales if they are padded; dynamic in num_tokens and num_positions; CUDA graphs and
        export: yes. On a CPU, compiled code may round the rotation differently from eager code,
        which changes a code by at most one step.

    Source: vLLM 0.33's inverse RoPE and quantisation; like the two separate ops, this op rounds to
        bfloat16 in between.

    Example:
        >>> import torch, dsv4_ops
        >>> o = torch.full((1, 2, 512), 3.0, dtype=torch.bfloat16)
        >>> quantized = dsv4_ops.inverse_rope_group_quantize(
        ...     o, torch.tensor([-1]), torch.zeros(1, 64), num_groups=2,
        ...     scale_layout="column_padded"
        ... )
        >>> quantized.values[1, 0, 0].item(), quantized.scales[1, 0].tolist()  # 3 / 2^-7
        (384.0, [0.0078125, 0.0, 0.0, 0.0])
    """
    checks = Checks("inverse_rope_group_quantize")
    belongs_to = "the matrix product takes"
    checks.one_of("scale_layout", scale_layout, *SCALE_LAYOUTS, belongs_to=belongs_to)
    _check_groups(checks, o, positions, cos_sin_cache, MainLayout.head_dim, num_groups)
    settings: dict[str, Any] = {"num_groups": num_groups, "scale_layout": scale_layout}
    groups = _inverse_rope_group_quantize(o, positions, cos_sin_cache, **settings)
    return QuantizedGroups(*groups)


def _check_groups(
    checks: Checks,
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    dim: str | int,
    num_groups: int,
) -> None:
    checks.at_least(1, num_groups=num_groups)
    checks.tensor("o", o, torch.bfloat16, "num_tokens", "num_heads", dim)
    checks.divides("num_groups", num_groups, "num_heads", o.shape[1])
    checks.rotation(positions, cos_sin_cache, "rope_dim")
    checks.even("cos_sin_cache", cos_sin_cache, "dim", o.shape[2])


_qnorm_rope_kv_insert = define_op(
    "rope",
    "qnorm_rope_kv_insert(Tensor q, Tensor kv, Tensor(a!) k_cache, Tensor slot_mapping, "
    "Tensor positions, Tensor cos_sin_cache, *, float eps, int block_size, str layout) "
    "-> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=(*_DIMENSIONS, "num_heads", "num_slots", "num_blocks"),
    source="vLLM 0.33 fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, with bounds",
)


def qnorm_rope_kv_insert(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    eps: float,
    block_size: int,
    layout: str = MainLayout.tag,
) -> Tensor:
    """Normalise and rotate the queries; rotate the keys and insert them.

    The keys go to the window cache.

    Args:
        q: Queries, [num_tokens, num_heads, 512], bfloat16, any strides.
        kv: Keys after their own RMSNorm, [num_tokens, 512], bfloat16, any strides.
        k_cache: "v4_fp8": [num_blocks, page_bytes], uint8, from ``MainLayout.allocate``. "plain":
            [num_blocks, block_size, 512], bfloat16, from ``PlainLayout.allocate``.
        slot_mapping: Slot of each of the first num_slots tokens, [num_slots], int64; num_slots is
            at most num_tokens. Keys of later tokens, and keys with a slot below 0 or past the last
            block, are not written.
        positions: Absolute position of every token, [num_tokens], int64. Rows at positions below 0
            or past the end of the table are not rotated.
        cos_sin_cache: From ``rope_cos_sin_cache``, [num_positions, 64], float32.
        eps: Added to the mean square in the RMSNorm. Above 0.
        block_size: Rows per block. At least 1.
        layout: Tag of the cache's layout, "v4_fp8" or "plain".

    Returns:
        A tensor like ``q``, dense: each head after RMSNorm without a weight, with its last 64
        values rotated as by ``apply_rope``, computed in float32 with one cast. A head whose sum of
        squares overflows float32 becomes 0.

    Mutates: ``k_cache``: only the bytes of the slots that the call writes. The bytes are those of
        ``apply_rope`` followed by ``quantize_and_insert_k_cache`` (or ``insert_k_cache``), bit for
        bit; a NaN among the rotated values is stored as 0x7FC0. If two tokens share a slot, the
        slot may hold a mix of their bytes. Only this op and ``insert_c4_step`` mutate an argument
        and also return a result, because they fuse independent parts into one launch.

    Raises:
        ValueError: shapes that disagree, a cache that is not of this layout, more slots than
            tokens, ``eps`` not above 0, ``block_size`` below 1, an unknown layout, or several
            devices.
        TypeError: a dtype other than those above.

    Compile: writes in place, without a copy of the cache; on CUDA our Triton kernel runs once, both
        in graphs and in AOTInductor packages; on a CPU, Inductor generates loops and scatters;
        dynamic in num_tokens, num_heads, num_slots, num_blocks and num_positions; CUDA graphs and
        export: yes.

    Source: vLLM 0.33 ``fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert``.

    Example:
        >>> import torch, dsv4_ops
        >>> from dsv4_ops.core.layout import MainLayout
        >>> cos_sin_cache = dsv4_ops.rope_cos_sin_cache(9, theta=10000.0)
        >>> k_cache = MainLayout(block_size=64).allocate(num_blocks=4)
        >>> q = torch.full((1, 2, 512), 3.0, dtype=torch.bfloat16)
        >>> kv, slot_mapping = torch.ones(1, 512, dtype=torch.bfloat16), torch.tensor([130])
        >>> q = dsv4_ops.qnorm_rope_kv_insert(
        ...     q, kv, k_cache, slot_mapping, torch.tensor([0]), cos_sin_cache,
        ...     eps=1e-6, block_size=64
        ... )
        >>> q[0, 1, 510:], k_cache[2, 2 * 576 :][:2]
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([120, 120], dtype=torch.uint8))
    """
    tensors = (q, kv, k_cache, slot_mapping, positions, cos_sin_cache)
    settings: dict[str, Any] = {"eps": eps, "block_size": block_size, "layout": layout}
    head_dim = MainLayout.head_dim
    checks = Checks("qnorm_rope_kv_insert")
    checks.above(0, eps=eps)
    checks.at_least(1, block_size=block_size)
    checks.one_of("layout", layout, MainLayout.tag, PlainLayout.tag)
    check_query(checks, q, kv)
    if layout == PlainLayout.tag:
        checks.storage("k_cache", k_cache, "PlainLayout", layout, torch.bfloat16)
        checks.rows("k_cache", k_cache, block_size)
        checks.apart("k_cache", k_cache)
        checks.tensor("k_cache", k_cache, torch.bfloat16, "num_blocks", "block_size", head_dim)
    else:
        checks.pages("k_cache", k_cache, MainLayout(block_size))
    checks.tensor("slot_mapping", slot_mapping, torch.int64, "num_slots")
    checks.rotation(positions, cos_sin_cache, ROPE_DIM)
    checks.no_more_than_tokens("slot_mapping", slot_mapping)
    return _qnorm_rope_kv_insert(*tensors, **settings)


def check_query(checks: Checks, q: Tensor, kv: Tensor) -> None:
    """Check the queries and keys of every token."""
    checks.tensor("q", q, torch.bfloat16, "num_tokens", "num_heads", MainLayout.head_dim)
    checks.tensor("kv", kv, torch.bfloat16, "num_tokens", MainLayout.head_dim)
