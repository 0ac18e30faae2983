"""Block-scaled FP8 linear layers and the quantisation of their activations."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import ACTIVATION_BLOCK, WEIGHT_BLOCK
from dsv4_ops.core.registry import AUTO, KERNEL_ON_CUDA, REFERENCE, TRITON
from dsv4_ops.core.types import NormedPair, QuantizedRows
from dsv4_ops.dispatch.choice import check_impl
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.dispatch.libraries import SCALED_MM

PROVIDERS = (TRITON, SCALED_MM, REFERENCE)

_SCALES, _SCALE_LAYOUTS = ("pow2", "float32"), ("row", "column_padded")
_ACTIVATIONS = ("bf16", "fp8")
_OUT_DTYPES = (torch.bfloat16, torch.float32)
_SOURCE = "DeepSeek-V4 inference/kernel.py, FP8 products with 128 x 128 weight scales"

_quantize_rows = define_op(
    "linear",
    "quantize_rows(Tensor x, *, int block, str scale, float min_amax, str scale_layout) "
    "-> (Tensor, Tensor)",
    dynamic=("num_tokens",),
    source="DeepSeek-V4 inference/kernel.py, activation quantisation",
)
_SETTINGS = "*, str activations, ScalarType out_dtype, str impl='auto'"
_fp8_linear = define_op(
    "linear",
    "fp8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? x_scale=None, "
    f"{_SETTINGS}) -> Tensor",
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens",),
    source=_SOURCE,
    providers=PROVIDERS,
)
_fp8_linear_norms = define_op(
    "linear",
    "fp8_linear_norms(Tensor x, Tensor weight, Tensor scale, Tensor first_norm, "
    "Tensor second_norm, *, float eps, str activations) -> (Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="DeepSeek-V4 inference/model.py, q_norm and kv_norm",
)
_fp8_linear_swiglu = define_op(
    "linear",
    "fp8_linear_swiglu(Tensor x, Tensor weight, Tensor scale, *, float swiglu_limit, "
    "str activations) -> Tensor",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    source="DeepSeek-V4 inference/model.py, Expert",
)
_fp8_grouped_linear = define_op(
    "linear",
    "fp8_grouped_linear(Tensor x, Tensor weight, Tensor scale, Tensor? x_scale=None, "
    f"{_SETTINGS}) -> Tensor",
    lowering={"cpu": "decompose", "cuda": "choices"},
    dynamic=("num_tokens",),
    source=f"{_SOURCE}; its grouped output projection",
    providers=PROVIDERS,
)


def quantize_rows(
    x: Tensor,
    *,
    block: int = ACTIVATION_BLOCK,
    scale: str = "pow2",
    min_amax: float = 1e-4,
    scale_layout: str = "row",
) -> QuantizedRows:
    """Quantise rows to FP8, with one scale per ``block`` values of a row.

    Args:
        x: Activations, [num_tokens, in_features], bfloat16, any strides.
        block: Values per scale; divides in_features. At least 1.
        scale: "pow2": the smallest power of two, at least 2^-126, for which amax / scale is at most
            448 (DeepSeek's recipe). "float32": amax / 448 (Hugging Face's).
        min_amax: Lower limit: a block with a smaller amax gets the scale of ``min_amax``. Above 0.
        scale_layout: Layout of the scales: "row", or "column_padded" for matrix products on SM90.

    Returns:
        ``QuantizedRows(values, scales)``, dense:

        - values, float8_e4m3fn [num_tokens, in_features]: x divided by its scale, rounded to
          nearest even. NaN becomes code 0x7F and does not affect the scale; an infinity saturates,
          and affects the scale like the largest bfloat16.
        - scales, float32. "row": [num_tokens, in_features / block]. "column_padded": [in_features /
          block, padded_tokens], where padded_tokens is a multiple of 4 and padding is 0.

    Mutates: nothing.

    Raises:
        ValueError: a ``block`` that does not divide in_features, a number out of range, or an
            unknown setting.
        TypeError: a dtype other than bfloat16.

    Compile: Inductor generates one reduction, which fuses with a preceding norm; dynamic in
        num_tokens; CUDA graphs and export: yes. With scale="float32", compiled code on a GPU may
        round divisions differently from eager code, which changes a code by at most one step.

    Source: DeepSeek-V4's act_quant; Hugging Face's recipe has scale="float32", min_amax=1e-12.

    Example:
        >>> import torch, dsv4_ops
        >>> x = torch.tensor([[3.0, -0.5, 0.0, 0.0]], dtype=torch.bfloat16)
        >>> rows = dsv4_ops.quantize_rows(x, block=2)
        >>> rows.values.float().tolist(), rows.scales[0, 0].item()  # 3 / 2^-7
        ([[384.0, -64.0, 0.0, 0.0]], 0.0078125)
    """
    checks = Checks("quantize_rows")
    checks.at_least(1, block=block)
    checks.one_of("scale", scale, *_SCALES, belongs_to="the recipe has")
    checks.above(0, min_amax=min_amax)
    belongs_to = "the matrix product takes"
    checks.one_of("scale_layout", scale_layout, *_SCALE_LAYOUTS, belongs_to=belongs_to)
    checks.tensor("x", x, torch.bfloat16, "num_tokens", "in_features")
    checks.divides("block", block, "in_features", int(x.shape[1]))
    return QuantizedRows(
        *_quantize_rows(x, block=block, scale=scale, min_amax=min_amax, scale_layout=scale_layout)
    )


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    *,
    activations: str = "bf16",
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str = AUTO,
) -> Tensor:
    """Multiply rows by an FP8 weight with a scale per block of 128 x 128.

    Args:
        x: Activations, [num_tokens, in_features], any strides: bfloat16, or with ``x_scale``
            float8_e4m3fn.
        weight: [out_features, in_features], float8_e4m3fn; both sizes are multiples of 128.
        scale: [out_features / 128, in_features / 128], float32, or uint8 with UE8M0 bytes: byte b
            is 2^(b - 127), and 255 is NaN. Pass a float8_e8m0fnu tensor as
            ``scale.view(torch.uint8)``.
        x_scale: Scales of ``x``, [num_tokens, in_features / 128], float32, from ``quantize_rows``;
            None for bfloat16.
        activations: Format in which bfloat16 activations are multiplied: "bf16" (W8A16), or "fp8"
            (W8A8), quantised by ``quantize_rows`` with its defaults. No effect with ``x_scale``.
        out_dtype: dtype of the result, bfloat16 or float32.
        impl: "auto", "triton", "reference", or "scaled_mm": torch's own block-scaled product, which
            runs on Hopper with FP8 activations, in_features that are a multiple of 512, and a
            bfloat16 result. "auto" selects "scaled_mm" for 128 tokens or more, unless their number
            is symbolic.

    Returns:
        ``out_dtype`` [num_tokens, out_features], dense: the products of the values (codes times
        scales), summed in float32 and cast once.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a transposed or missing scale, several devices, or an
            unknown setting.
        TypeError: a dtype other than those above.
        RuntimeError, NotImplementedError: ``impl`` is not available here, or does not support the
            call.

    Compile: on a GPU one kernel of ours, which reads the weight once for up to 128 tokens; for few
        out_features it splits in_features, and a second step sums the splits. The weight code for
        NaN (0x7F), which released files do not have, reads as 480. On Hopper, the kernel multiplies
        codes if activations are FP8, the result is bfloat16, and the number of tokens is symbolic
        or above 32 (above 16 for ``fp8_grouped_linear``). Sums over 128 columns are then accurate
        to about 14 bits, as in torch's product. On a CPU the weight is dequantised to float32 and
        multiplied once. Dynamic in num_tokens; CUDA graphs and export: yes.

    Source: DeepSeek-V4's fp8_gemm. With power-of-two scales the values are exact in bfloat16, so
        W8A16 equals the product with a dequantised bfloat16 weight up to the order of sums.

    Example:
        >>> import torch, dsv4_ops
        >>> x = torch.ones(1, 128, dtype=torch.bfloat16)
        >>> weight = torch.full((128, 128), 1.5).to(torch.float8_e4m3fn)
        >>> scale = torch.tensor([[128]], dtype=torch.uint8)  # 2^(128 - 127)
        >>> dsv4_ops.fp8_linear(x, weight, scale)[0, :2].tolist()  # 128 * 1.5 * 2
        [384.0, 384.0]
    """
    checks = Checks("fp8_linear")
    _check_activations(checks, x, x_scale, "num_tokens", "in_features")
    _check_weight(checks, weight, scale, 1)
    columns = int(x.shape[1]) // ACTIVATION_BLOCK
    checks.optional("x_scale", x_scale, torch.float32, "num_tokens", columns)
    _check_settings(checks.op, activations, out_dtype, impl, x, weight, x_scale)
    return _fp8_linear(
        x, weight, scale, x_scale, activations=activations, out_dtype=out_dtype, impl=impl
    )


def fp8_linear_norms(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    first_norm: Tensor,
    second_norm: Tensor,
    *,
    eps: float = 1e-6,
    activations: str = "bf16",
) -> NormedPair:
    """Multiply rows by an FP8 weight, and normalise two parts of each result.

    In attention, the two parts are the query's latent and the key; one weight holds both
    projections.

    Args:
        x: Activations, [num_tokens, in_features], bfloat16, any strides.
        weight: [out_features, in_features], float8_e4m3fn; both sizes are multiples of 128.
        scale: As for ``fp8_linear``.
        first_norm: Norm weight of the first part, [first_features], float32.
        second_norm: Norm weight of the rest, [out_features - first_features], float32.
        eps: Added to the mean squares. Above 0.
        activations: "bf16" or "fp8", as for ``fp8_linear``.

    Returns:
        ``NormedPair(first, second)``, bfloat16 [num_tokens, ..], dense: RMSNorm(y) * norm for each
        part y of the bfloat16 result of ``fp8_linear``, computed in float32 with one cast.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a transposed scale, several devices, a number out of
            range, or an unknown setting.
        TypeError: a dtype other than those above.

    Compile: on a GPU two kernels: the product as in ``fp8_linear``, and one that adds the product's
        splits and normalises; on a CPU a product and two norms. Dynamic in num_tokens; CUDA graphs
        and export: yes.

    Source: DeepSeek-V4's q_norm and kv_norm.

    Example:
        >>> import torch, dsv4_ops
        >>> x, weight = torch.ones(1, 128).bfloat16(), torch.ones(128, 128).to(torch.float8_e4m3fn)
        >>> norms = torch.full((96,), 2.0), torch.full((32,), 0.5)
        >>> found = dsv4_ops.fp8_linear_norms(x, weight, torch.ones(1, 1), *norms)
        >>> found.first[0, 0].item(), found.second.shape, found.second[0, 0].item()
        (2.0, torch.Size([1, 32]), 0.5)
    """
    checks = Checks("fp8_linear_norms")
    checks.tensor("x", x, torch.bfloat16, "num_tokens", "in_features")
    _check_weight(checks, weight, scale, 1)
    checks.tensor("first_norm", first_norm, torch.float32, "first_features")
    rest = int(weight.shape[0]) - int(first_norm.shape[0])
    checks.at_least(1, first_features=int(first_norm.shape[0]), second_features=rest)
    checks.tensor("second_norm", second_norm, torch.float32, rest)
    checks.above(0, eps=eps)
    checks.one_of("activations", activations, *_ACTIVATIONS, belongs_to="the recipe has")
    tensors = (x, weight, scale, first_norm, second_norm)
    return NormedPair(*_fp8_linear_norms(*tensors, eps=eps, activations=activations))


def fp8_linear_swiglu(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    swiglu_limit: float,
    activations: str = "bf16",
) -> Tensor:
    """Multiply rows by the FP8 weights of gate and up, and apply SwiGLU.

    Args:
        x: Activations, [num_tokens, in_features], bfloat16, any strides.
        weight: [out_features, in_features], float8_e4m3fn, with the rows of the gate first; both
            sizes are multiples of 128.
        scale: As for ``fp8_linear``.
        swiglu_limit: Upper limit of the gate and of the up projection's absolute value. Above 0.
        activations: "bf16" or "fp8", as for ``fp8_linear``.

    Returns:
        bfloat16 [num_tokens, out_features / 2], dense: silu(min(g, limit)) * clamp(u, -limit,
        limit) for the bfloat16 result (g, u) of ``fp8_linear``, computed in float32 with one cast.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, a transposed scale, several devices, a number out of
            range, or an unknown setting.
        TypeError: a dtype other than those above.

    Compile: on a GPU two kernels: the product as in ``fp8_linear``, and one that adds the product's
        splits and applies SwiGLU; on a CPU a product and pointwise ops. Dynamic in num_tokens; CUDA
        graphs and export: yes.

    Source: DeepSeek-V4's Expert.

    Example:
        >>> import torch, dsv4_ops
        >>> x = torch.ones(1, 128).bfloat16()
        >>> weight, scale = torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)
        >>> dsv4_ops.fp8_linear_swiglu(x, weight, scale, swiglu_limit=16.0)[0, 0].item()
        256.0
    """
    checks = Checks("fp8_linear_swiglu")
    checks.tensor("x", x, torch.bfloat16, "num_tokens", "in_features")
    _check_weight(checks, weight, scale, 1)
    checks.above(0, swiglu_limit=swiglu_limit)
    checks.one_of("activations", activations, *_ACTIVATIONS, belongs_to="the recipe has")
    settings = {"swiglu_limit": swiglu_limit, "activations": activations}
    result: Tensor = _fp8_linear_swiglu(x, weight, scale, **settings)
    return result


def fp8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    x_scale: Tensor | None = None,
    *,
    activations: str = "bf16",
    out_dtype: torch.dtype = torch.bfloat16,
    impl: str = AUTO,
) -> Tensor:
    """Multiply each group of values by its own rows of a block-scaled FP8 weight.

    This is the output projection ``o_a_proj``: it takes the result of ``inverse_rope_group``, or of
    ``inverse_rope_group_quantize`` with scale_layout="row".

    Args:
        x: [num_tokens, num_groups, in_features], bfloat16, any strides; or with ``x_scale``
            [num_groups, num_tokens, in_features], float8_e4m3fn.
        weight: [out_features, in_features], float8_e4m3fn, with the rows of the first group first;
            in_features and out_features / num_groups are multiples of 128.
        scale: [out_features / 128, in_features / 128], float32, or uint8 with UE8M0 bytes, as for
            ``fp8_linear``.
        x_scale: Scales of ``x``, [num_groups, num_tokens, in_features / 128], float32; None for
            bfloat16.
        activations: "bf16" or "fp8", as for ``fp8_linear``.
        out_dtype: dtype of the result, bfloat16 or float32.
        impl: As for ``fp8_linear``. "scaled_mm" calls torch once per group, and "auto" never
            selects it.

    Returns:
        ``out_dtype`` [num_tokens, out_features], dense: the results of all groups side by side,
        each as ``fp8_linear`` computes it.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, groups that do not divide the weight into blocks, a
            transposed or missing scale, several devices, or an unknown setting.
        TypeError: a dtype other than those above.
        RuntimeError, NotImplementedError: as ``fp8_linear``.

    Compile: as ``fp8_linear``; on a CPU, one batched product.

    Source: DeepSeek-V4's output projection. DeepSeek's code multiplies by a dequantised weight.

    Example:
        >>> import torch, dsv4_ops
        >>> x = torch.ones(1, 2, 128, dtype=torch.bfloat16)
        >>> x[:, 1] = 2
        >>> weight, scale = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.ones(2, 1)
        >>> dsv4_ops.fp8_grouped_linear(x, weight, scale)[0, [0, 128]].tolist()
        [128.0, 256.0]
    """
    checks = Checks("fp8_grouped_linear")
    rows = ("num_tokens", "num_groups") if x_scale is None else ("num_groups", "num_tokens")
    _check_activations(checks, x, x_scale, *rows, "in_features")
    num_groups = int(checks.sizes["num_groups"])
    checks.at_least(1, num_groups=num_groups)
    _check_weight(checks, weight, scale, num_groups)
    columns = int(x.shape[2]) // ACTIVATION_BLOCK
    checks.optional("x_scale", x_scale, torch.float32, "num_groups", "num_tokens", columns)
    _check_settings(checks.op, activations, out_dtype, impl, x, weight, x_scale)
    return _fp8_grouped_linear(
        x, weight, scale, x_scale, activations=activations, out_dtype=out_dtype, impl=impl
    )


def _check_activations(checks: Checks, x: Tensor, x_scale: Tensor | None, *dims: str) -> None:
    quantized = isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn
    if x_scale is None and quantized:
        raise checks.error(
            "x_scale",
            must=f"be given with x of {x.dtype}",
            got=None,
            do="Pass both results of quantize_rows",
        )
    checks.tensor("x", x, torch.bfloat16 if x_scale is None else torch.float8_e4m3fn, *dims)


def _check_weight(checks: Checks, weight: Tensor, scale: Tensor, num_groups: int) -> None:
    checks.tensor("weight", weight, torch.float8_e4m3fn, "out_features", "in_features")
    # configured sizes: constants in compiled code
    rows, columns = (int(size) for size in weight.shape)
    checks.divides("the columns of a block", WEIGHT_BLOCK, "in_features", columns)
    what = "the rows of a block" if num_groups == 1 else "the rows of a block in every group"
    checks.divides(what, WEIGHT_BLOCK * num_groups, "out_features", rows)
    checks.floats("scale", scale, torch.float32, torch.uint8)
    blocks = rows // WEIGHT_BLOCK, columns // WEIGHT_BLOCK
    checks.tensor("scale", scale, scale.dtype, *blocks)


def _check_settings(
    op: str,
    activations: str,
    out_dtype: torch.dtype,
    impl: str,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
) -> None:
    checks = Checks(op)
    checks.one_of("activations", activations, *_ACTIVATIONS, belongs_to="the recipe has")
    if out_dtype not in _OUT_DTYPES:
        raise argument_error(
            op,
            "out_dtype",
            must="be torch.bfloat16 or torch.float32",
            got=out_dtype,
            do="Cast the result to another dtype",
            kind=TypeError,
        )
    values = {"weight": weight, "x_scale": x_scale, "activations": activations}
    check_impl(op, PROVIDERS, impl, x.device, {**values, "out_dtype": out_dtype})
