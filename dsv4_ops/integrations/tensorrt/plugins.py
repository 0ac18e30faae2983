"""TensorRT plugins for our ops, with handwritten descriptors and the PTX of our kernels.

Experimental: the authors built no engine with a plugin (docs/tensorrt.md). torch-tensorrt's
``generate_plugin`` does not fit: it calls fakes with float32 tensors, and gives outputs the dtype
of the first input. torch-tensorrt's ``generate_plugin_converter`` drops keyword arguments.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error
from dsv4_ops.core.layout import PlainLayout, combined_width
from dsv4_ops.core.registry import AUTO, NAMESPACE, OPS
from dsv4_ops.integrations.tensorrt import _compat
from dsv4_ops.integrations.tensorrt.ptx import Kernel, kernel_of


@dataclass(frozen=True)
class _Plugin:
    """An op as a layer of an engine.

    Args:
        inputs: Names of the tensors.
        attributes: Names and types of the settings, which are constants of the kernel.
        num_outputs: Number of results.
        outputs: Function from the input descriptors and the attributes to the output descriptors.
        launch: Function from the input descriptors, a compute capability and the attributes to the
            kernel, its grid and its integer arguments.
        takes: Function that says whether the layer supports these inputs and settings.
    """

    inputs: tuple[str, ...]
    attributes: dict[str, type]
    num_outputs: int
    outputs: Callable[..., Any]
    launch: Callable[..., tuple[Kernel, Any, tuple[Any, ...]]]
    takes: Callable[..., bool]


_registered: set[str] = set()


def register_plugins(*, capability: tuple[int, int] | None = None) -> tuple[str, ...]:
    """Let engines run three ops as layers.

    The ops are ``apply_rope``, ``combine_topk_swa_indices`` and ``indexer_logits``. The plugins are
    experimental, and need Triton, and torch-tensorrt 2.13 or later with TensorRT's plugins. Call
    this function after ``enable`` and before you compile. ``apply_rope`` needs an x in bfloat16 or
    float32 whose last dimension is a power of two. ``indexer_logits`` needs the layout "plain", at
    most 64 heads and no schedule. Other calls of the three ops stay in PyTorch segments.

    Args:
        capability: Compute capability of the GPU that runs the engines; by default, that of the
            current device.

    Returns:
        Names of the ops with a plugin.

    Raises:
        ImportError: torch-tensorrt or Triton is missing, or torch-tensorrt has no plugins.
    """
    op = "register_plugins"
    _compat.load(op)
    try:
        plugin = importlib.import_module("tensorrt.plugin")
        conversion = importlib.import_module("torch_tensorrt.dynamo.conversion")
        importlib.import_module("triton")
    except ImportError as error:
        raise argument_error(
            op,
            "torch_tensorrt",
            must="have plugins, and Triton must be installed",
            got=str(error),
            do="Install torch-tensorrt 2.13 or later",
            kind=ImportError,
        ) from error
    major, minor = capability or torch.cuda.get_device_capability()
    for name in _PLUGINS.keys() - _registered:
        _register(plugin, name, 10 * major + minor)
        conversion.dynamo_tensorrt_converter(
            OPS[name].op,
            capability_validator=functools.partial(_takes, _PLUGINS[name]),
            supports_dynamic_shapes=True,
        )(functools.partial(_convert, name))
        _registered.add(name)
    return tuple(sorted(_registered))


def _takes(plugin: _Plugin, node: Any, settings: Any) -> bool:
    values = [each.meta["val"] if each is not None else None for each in node.args]
    return plugin.takes(*values, **node.kwargs)


def _convert(op: str, ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Add the plugin's layer to the engine."""
    plugin = importlib.import_module("tensorrt.plugin")
    converter_utils = importlib.import_module("torch_tensorrt.dynamo.conversion.converter_utils")
    spec = _PLUGINS[op]
    tensors = [
        converter_utils.get_trt_tensor(ctx, tensor, f"{name}_{place}")
        for place, tensor in enumerate(args[: len(spec.inputs)])
    ]
    settings = {key: kind(kwargs[key]) for key, kind in spec.attributes.items()}
    made = getattr(plugin.op.dsv4_ops, op)(*tensors, **settings)
    layer = ctx.net.add_plugin(made, aot=True)
    layer.name = f"[{target}]-[{name}]"
    outputs = [layer.get_output(place) for place in range(spec.num_outputs)]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _register(plugin: Any, name: str, capability: int) -> None:
    """Register a plugin's two functions with TensorRT. The signatures of both functions list the
    arguments of the plugin."""
    spec, tensor = _PLUGINS[name], plugin.TensorDesc
    count = len(spec.inputs)

    def describe(*args: Any, **named: Any) -> Any:
        values = (*args, *named.values())
        settings = dict(zip(spec.attributes, values[count:], strict=True))
        found = spec.outputs(plugin, *values[:count], **settings)
        return found[0] if spec.num_outputs == 1 else found

    def aot(*args: Any, **named: Any) -> Any:
        values = (*args, *named.values())
        settings = dict(zip(spec.attributes, values[count:], strict=False))
        kernel, blocks, numbers = spec.launch(*values[:count], capability, **settings)
        launch = plugin.KernelLaunchParams()
        launch.grid_x, launch.block_x, launch.shared_mem = blocks, kernel.threads, kernel.shared
        scalars = plugin.SymIntExprs(len(numbers))
        for place, number in enumerate(numbers):
            scalars[place] = plugin.SymInt32(number)
        return kernel.name, kernel.ptx, launch, scalars

    kinds = {**dict.fromkeys(spec.inputs, tensor), **spec.attributes}
    several = types.GenericAlias(tuple, (tensor,) * spec.num_outputs)
    returned = tensor if spec.num_outputs == 1 else several
    _sign(describe, kinds, returned)
    launched = tuple[str, str, plugin.KernelLaunchParams, plugin.SymIntExprs]
    _sign(aot, dict.fromkeys((*kinds, "outputs", "tactic"), inspect.Parameter.empty), launched)
    plugin.register(f"{NAMESPACE}::{name}")(describe)
    plugin.aot_impl(f"{NAMESPACE}::{name}")(aot)


def _sign(function: Any, kinds: dict[str, Any], returned: Any) -> None:
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, positional, annotation=kind) for name, kind in kinds.items()
    ]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returned)


def apply_rope_kernel(
    dtype: torch.dtype, dim: int, rope: int, inverse: bool, capability: int
) -> Kernel:
    """Return the kernel of ``apply_rope``. The parameters are x, positions, cos_sin_cache, the
    number of rows per token, the number of rows of the table, and out. The kernel needs one thread
    block per row."""
    from dsv4_ops.integrations.tensorrt.kernels import apply_rope_kernel as kernel

    options = {"DIM": dim, "ROPE": rope, "INVERSE": inverse, "num_warps": 1}
    inputs = (dtype, torch.int64, torch.float32)
    return _compiled("apply_rope", kernel, inputs, 2, (dtype,), options, capability)


def combine_kernel(settings: dict[str, int], capability: int) -> Kernel:
    """Return the kernel of ``combine_topk_swa_indices``. The parameters are the op's tensors, the
    number of columns of topk_indices, the number of requests, and both results. The kernel needs
    one thread block per token."""
    from dsv4_ops.integrations.tensorrt.kernels import combine_topk_swa_kernel as kernel

    integer, long = torch.int32, torch.int64
    inputs = (integer, long, integer, integer, integer)
    options = combine_options(**settings)
    name = "combine_topk_swa_indices"
    return _compiled(name, kernel, inputs, 2, (integer, integer), options, capability)


def combine_options(
    *, window_size: int, compress_ratio: int, topk: int, workspace_rows: int, swa_offset: int
) -> dict[str, int]:
    """Return the constants of ``combine_topk_swa_kernel``."""
    width = combined_width(topk, window_size)
    rows = {"TOPK": topk, "ROWS": workspace_rows, "OFFSET": swa_offset}
    window = {"WINDOW": window_size, "RATIO": compress_ratio}
    return {**window, **rows, "WIDTH": width, "BLOCK": 1 << (width - 1).bit_length()}


LOGITS_ROWS = {torch.bfloat16: 64, torch.float32: 32}
"""Scores per thread block, by dtype of the keys. This number of keys and the queries of 64 heads
fit into 48 KiB, the default limit of shared memory."""


def logits_options(
    dtype: torch.dtype, num_heads: int, dim: int, *, num_rows: int, block_size: int
) -> dict[str, int]:
    """Return the constants of ``indexer_logits_kernel``."""
    heads = max(16, 1 << (num_heads - 1).bit_length())
    sizes = {"NUM_HEADS": num_heads, "HEADS": heads, "DIM": dim, "ROWS": LOGITS_ROWS[dtype]}
    return {**sizes, "NUM_ROWS": num_rows, "BLOCK_SIZE": block_size}


def logits_kernel(
    dtype: torch.dtype, num_heads: int, dim: int, settings: dict[str, int], capability: int
) -> Kernel:
    """Return the kernel of ``indexer_logits``. The parameters are the op's tensors except for the
    schedule; the numbers of requests, of columns of block_table and of blocks of k_cache; and the
    scores. The kernel needs one thread block per token and ``LOGITS_ROWS`` rows."""
    from dsv4_ops.integrations.tensorrt.kernels import indexer_logits_kernel as kernel

    integers = (torch.int32,) * 3
    inputs = (dtype, torch.float32, dtype, *integers)
    options = logits_options(dtype, num_heads, dim, **settings)
    outputs = (torch.float32,)
    return _compiled("indexer_logits", kernel, inputs, 3, outputs, options, capability)


def _compiled(
    op: str,
    kernel: Any,
    inputs: tuple[torch.dtype, ...],
    numbers: int,
    outputs: tuple[torch.dtype, ...],
    options: dict[str, Any],
    capability: int,
) -> Kernel:
    from dsv4_ops.kernels.aot.compile import Argument, compiled

    # do not specialise addresses or integers, because they change between runs of an engine
    first, last = (
        [Argument.tensor(dtype, aligned=False) for dtype in dtypes] for dtypes in (inputs, outputs)
    )
    arguments = [*first, *[Argument("i32")] * numbers, *last]
    return kernel_of(op, compiled(kernel, arguments, options, capability))


def _launch_rope(
    x: Any, positions: Any, cos_sin_cache: Any, capability: int, *, inverse: bool
) -> tuple[Kernel, Any, tuple[Any, ...]]:
    dtype = _dtype(x)
    dim, rope = (each.shape_expr[-1].constant_value() for each in (x, cos_sin_cache))
    rows = x.shape_expr.numel() // dim
    numbers = rows // positions.shape_expr[0], cos_sin_cache.shape_expr[0]
    return apply_rope_kernel(dtype, dim, rope, bool(inverse), capability), rows, numbers


def _dtype(x: Any) -> torch.dtype:
    is_bfloat16 = x.dtype == importlib.import_module("tensorrt").bfloat16
    return torch.bfloat16 if is_bfloat16 else torch.float32


def _takes_rope(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, **settings: Any) -> bool:
    dim, rope = x.shape[-1], cos_sin_cache.shape[-1]
    fixed = isinstance(dim, int) and isinstance(rope, int) and dim & (dim - 1) == 0
    fixed = fixed and not settings.get("rope_first") and settings.get("interleaved", True)
    return fixed and x.dtype in (torch.bfloat16, torch.float32)


def _launch_combine(
    topk_indices: Any,
    positions: Any,
    req_indices: Any,
    seq_lens: Any,
    gather_lens: Any,
    capability: int,
    **settings: int,
) -> tuple[Kernel, Any, tuple[Any, ...]]:
    numbers = topk_indices.shape_expr[1], seq_lens.shape_expr[0]
    return combine_kernel(settings, capability), positions.shape_expr[0], numbers


def _describe_combine(plugin: Any, topk_indices: Any, *rest: Any, **settings: int) -> Any:
    tokens, width = topk_indices.shape_expr[0], combine_options(**settings)["WIDTH"]
    shapes = (tokens, plugin.ShapeExpr(width)), (tokens,)
    return tuple(
        plugin.TensorDesc(plugin.ShapeExprs.from_tuple(shape), topk_indices.dtype)
        for shape in shapes
    )


def _describe_logits(
    plugin: Any, q: Any, weights: Any, *rest: Any, num_rows: int, **sizes: int
) -> Any:
    shape = (q.shape_expr[0], plugin.ShapeExpr(num_rows))
    return (plugin.TensorDesc(plugin.ShapeExprs.from_tuple(shape), weights.dtype),)


def _launch_logits(
    q: Any,
    weights: Any,
    k_cache: Any,
    lens: Any,
    req_indices: Any,
    block_table: Any,
    capability: int,
    **settings: int,
) -> tuple[Kernel, Any, tuple[Any, ...]]:
    dtype = _dtype(q)
    num_heads, dim = (q.shape_expr[place].constant_value() for place in (1, 2))
    spans = -(-settings["num_rows"] // LOGITS_ROWS[dtype])
    numbers = block_table.shape_expr[0], block_table.shape_expr[1], k_cache.shape_expr[0]
    kernel = logits_kernel(dtype, num_heads, dim, settings, capability)
    return kernel, q.shape_expr[0] * spans, numbers


def _takes_logits(
    q: Tensor, weights: Tensor, k_cache: Tensor, *rest: Tensor | None, **settings: Any
) -> bool:
    """Whether a call has a plain cache, at most 64 heads (as ``LOGITS_ROWS`` assumes), and no
    schedule of DeepGEMM."""
    sizes = (*q.shape[1:], settings["num_rows"], settings["block_size"])
    known = settings["layout"] == PlainLayout.tag and all(type(size) is int for size in sizes)
    taken = known and 0 < sizes[0] <= 64 and sizes[2] > 0
    ours = settings.get("impl", AUTO) == AUTO and rest[3:] in ((), (None,))
    return taken and ours and q.dtype in LOGITS_ROWS


_PLUGINS = {
    "apply_rope": _Plugin(
        ("x", "positions", "cos_sin_cache"),
        {"inverse": bool},
        1,
        lambda plugin, x, *rest, **settings: (x.like(),),
        _launch_rope,
        _takes_rope,
    ),
    "combine_topk_swa_indices": _Plugin(
        ("topk_indices", "positions", "req_indices", "seq_lens", "gather_lens"),
        dict.fromkeys(
            ("window_size", "compress_ratio", "topk", "workspace_rows", "swa_offset"), int
        ),
        2,
        _describe_combine,
        _launch_combine,
        lambda *values, **settings: True,
    ),
    "indexer_logits": _Plugin(
        ("q", "weights", "k_cache", "lens", "req_indices", "block_table"),
        {"num_rows": int, "block_size": int},
        1,
        _describe_logits,
        _launch_logits,
        _takes_logits,
    ),
}
