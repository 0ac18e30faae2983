"""Residual streams between blocks: manifold-constrained hyper-connections."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import REFERENCE
from dsv4_ops.core.registry import KERNEL_ON_CUDA
from dsv4_ops.core.types import HyperConnection
from dsv4_ops.dispatch.define import define_op
from dsv4_ops.ops.sinkhorn import MAX_ITERATIONS, MAX_STREAMS, check_at_most

_hyper_connection = define_op(
    "streams",
    "hyper_connection(Tensor streams, Tensor fn, Tensor base, Tensor scale, "
    "Tensor norm_weight, Tensor? block_out=None, Tensor? post=None, Tensor? mix=None, *, "
    "int iterations, float eps, float norm_eps) -> (Tensor, Tensor, Tensor, Tensor)",
    lowering=KERNEL_ON_CUDA,
    dynamic=("num_tokens",),
    gradient=REFERENCE,
    source="DeepSeek-V4 manifold-constrained hyper-connections",
)


def hyper_connection(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    block_out: Tensor | None = None,
    post: Tensor | None = None,
    mix: Tensor | None = None,
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> HyperConnection:
    """Connect the residual streams of one block to the next.

    If ``block_out`` is passed, the op mixes the streams and adds the output of the previous block.
    The op computes every token's weights pre, post and mix from the token's streams, then collapses
    and normalises the streams for the next block.

    Args:
        streams: [num_tokens, num_streams, hidden_size], bfloat16, any strides. At most 8 streams.
        fn: Projection, [num_weights, num_streams * hidden_size], float32, where num_weights =
            num_streams * (num_streams + 2): a row for each entry of pre, post and mix.
        base: Bias of the weights, [num_weights], float32.
        scale: Factors of the weights of pre, post and mix, [3], float32.
        norm_weight: Weight of the next block's norm, [hidden_size], float32.
        block_out: Output of the previous block, [num_tokens, hidden_size], bfloat16. It requires
            ``post`` [num_tokens, num_streams] and ``mix`` [num_tokens, num_streams, num_streams],
            float32, from the previous call.
        iterations: As for ``sinkhorn``.
        eps: As for ``sinkhorn``; also added to pre.
        norm_eps: Added to the mean square in both norms. Above 0.

    Returns:
        ``HyperConnection(streams, post, mix, x)``, dense:

        - streams, bfloat16: new_i = post_i * block_out + sum_j mix_ji * streams_j, in float32 with
          one cast. Without ``block_out``, this field is empty, [0, num_streams, hidden_size], and
          new in the other fields is the argument ``streams``.
        - post, float32: 2 sigmoid(w_post), for the next call, where w = scale * (RMSNorm(new, all
          streams) fn^T) + base.
        - mix, float32: sinkhorn(w_mix), for the next call.
        - x, [num_tokens, hidden_size], bfloat16: RMSNorm(bf16(sum_i (sigmoid(w_pre) + eps)_i *
          new_i)) * norm_weight.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, several devices, a number out of range, or one of
            ``block_out``, ``post`` and ``mix`` without the others.
        TypeError: a dtype other than those above.

    Compile: on a GPU two kernels: one for split-K products, then one with two programs per token.
        If num_tokens is static and large (449 or more at DeepSeek-V4-Flash's sizes), each of these
        two programs becomes a kernel, so there are three kernels. On a CPU, and for derivatives,
        plain torch ops. Dynamic in num_tokens; CUDA graphs and export: yes.

    Source: DeepSeek-V4's hyper-connections.

    Example:
        >>> import torch, dsv4_ops
        >>> streams = torch.tensor([[[1.0, -3.0], [1.0, 1.0]]]).bfloat16()
        >>> fn, base, scale = torch.zeros(8, 4), torch.zeros(8), torch.ones(3)
        >>> found = dsv4_ops.hyper_connection(streams, fn, base, scale, torch.tensor([2.0, 3.0]))
        >>> found.x.tolist(), found.post.tolist()  # the mean of the streams is [1, -1]
        ([[2.0, -3.0]], [[1.0, 1.0]])
    """
    checks = Checks("hyper_connection")
    checks.at_least(1, iterations=iterations)
    check_at_most(checks.op, "iterations", iterations, MAX_ITERATIONS)
    checks.tensor("streams", streams, torch.bfloat16, "num_tokens", "num_streams", "hidden_size")
    count, width = int(streams.shape[1]), int(streams.shape[2])  # configured sizes: constants
    checks.at_least(1, num_streams=count, hidden_size=width)
    check_at_most(checks.op, "num_streams", count, MAX_STREAMS)
    checks.tensor("fn", fn, torch.float32, count * (count + 2), count * width)
    checks.tensor("base", base, torch.float32, count * (count + 2))
    checks.tensor("scale", scale, torch.float32, 3)
    checks.tensor("norm_weight", norm_weight, torch.float32, "hidden_size")
    if block_out is not None:
        checks.comes_with("block_out", "post", post)
        checks.comes_with("block_out", "mix", mix)
        checks.tensor("block_out", block_out, torch.bfloat16, "num_tokens", "hidden_size")
    for name, value, dims in (("post", post, (count,)), ("mix", mix, (count, count))):
        if value is not None:
            checks.comes_with(name, "block_out", block_out)
            checks.tensor(name, value, torch.float32, "num_tokens", *dims)
    checks.above(0, eps=eps, norm_eps=norm_eps)
    tensors = (streams, fn, base, scale, norm_weight, block_out, post, mix)
    settings = {"iterations": iterations, "eps": eps, "norm_eps": norm_eps}
    return HyperConnection(*_hyper_connection(*tensors, **settings))
