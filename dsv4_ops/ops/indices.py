"""Build index matrices: sliding windows, top-k slots and their combinations."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_ops.core.checks import Checks
from dsv4_ops.core.gradient import INTEGERS
from dsv4_ops.core.layout import INDEX_ALIGNMENT
from dsv4_ops.core.types import SwaIndices, TopkIndices
from dsv4_ops.dispatch.define import define_op

_swa_indices_and_lens = define_op(
    "indices",
    "swa_indices_and_lens(Tensor positions, Tensor req_indices, Tensor "
    "block_table, *, int block_size, "
    "int window_size) -> (Tensor, Tensor)",
    lowering={"cpu": "pointwise", "cuda": "pointwise"},
    dynamic=("num_tokens", "num_reqs", "max_blocks"),
    source="vLLM 0.33 _compute_swa_indices_and_lens_kernel; semantics re-derived",
    gradient=INTEGERS,
)


def swa_indices_and_lens(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    window_size: int,
) -> SwaIndices:
    """List the cache slots of every token's sliding window, for decodes and prefills.

    The window of a token at position p is max(p - window_size + 1, 0) .. p, oldest first.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        block_table: Physical block of every logical block of the window cache, [num_reqs,
            max_blocks], int32, any strides.
        block_size: Rows per block. At least 1.
        window_size: Keys of a full window, including the token's own key. At least 1.

    Returns:
        ``SwaIndices(indices, lens)``: int32 [num_tokens, window_size] slots, -1 past the window,
        and int32 [num_tokens] window lengths. Padding tokens have a row of -1 and length 0. Inside
        the window, a slot is -1 if the key's block lies past the table or is negative, or if the
        slot exceeds int32.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than those above.

    Compile: pointwise lowering (one masked table read per entry); dynamic in all tensor sizes; CUDA
        graphs and export: yes.

    Source: vLLM 0.33 ``_compute_swa_indices_and_lens_kernel``.

    Example:
        >>> import torch, dsv4_ops
        >>> block_table = torch.tensor([[7, 3], [2, 5]], dtype=torch.int32)
        >>> positions, req_indices = torch.tensor([5, 1]), torch.tensor([0, 1], dtype=torch.int32)
        >>> window = dsv4_ops.swa_indices_and_lens(
        ...     positions, req_indices, block_table, block_size=4, window_size=4
        ... )
        >>> window.indices.tolist()
        [[30, 31, 12, 13], [8, 9, -1, -1]]
    """
    checks = Checks("swa_indices_and_lens")
    checks.tokens(positions, req_indices, block_table)
    checks.at_least(1, block_size=block_size, window_size=window_size)
    rows = (positions, req_indices, block_table)
    result = _swa_indices_and_lens(*rows, block_size=block_size, window_size=window_size)
    return SwaIndices(*result)


_prefill_gather_lens = define_op(
    "indices",
    "prefill_gather_lens(Tensor query_start_loc, Tensor seq_lens, *, int window_size) -> Tensor",
    dynamic=("num_reqs",),
    source="vLLM 0.33 _compute_prefill_metadata_kernel; semantics re-derived",
    gradient=INTEGERS,
)


def prefill_gather_lens(query_start_loc: Tensor, seq_lens: Tensor, *, window_size: int) -> Tensor:
    """Count the last positions of each request that its query tokens' windows cover.

    Args:
        query_start_loc: First token of every request and one past the last token, [num_reqs + 1],
            int32, non-decreasing.
        seq_lens: Number of tokens of each request, context included, [num_reqs], int32. 0 marks a
            padding request.
        window_size: Keys of a full window, including the token's own key. At least 1.

    Returns:
        int32 [num_reqs]: query length + min(context length, window_size - 1), but at most the
        length of the request.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than int32.

    Compile: decomposes to one pointwise kernel; dynamic in num_reqs; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``_compute_prefill_metadata_kernel``.

    Example:
        >>> import torch, dsv4_ops
        >>> query_start_loc = torch.tensor([0, 2, 4], dtype=torch.int32)
        >>> seq_lens = torch.tensor([9, 3], dtype=torch.int32)
        >>> dsv4_ops.prefill_gather_lens(query_start_loc, seq_lens, window_size=4).tolist()
        [5, 3]
    """
    checks = Checks("prefill_gather_lens")
    checks.tensor("query_start_loc", query_start_loc, torch.int32, "num_reqs + 1")
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.at_least(1, window_size=window_size)
    return _prefill_gather_lens(query_start_loc, seq_lens, window_size=window_size)


_global_topk_indices_and_lens = define_op(
    "indices",
    "global_topk_indices_and_lens(Tensor topk_indices, Tensor req_indices, Tensor "
    "block_table, *, "
    "int block_size) -> (Tensor, Tensor)",
    dynamic=("num_tokens", "num_reqs", "max_blocks", "topk"),
    source="vLLM 0.33 compute_global_topk_indices_and_lens, with the bounds its newer tests demand",
    gradient=INTEGERS,
)


def global_topk_indices_and_lens(
    topk_indices: Tensor, req_indices: Tensor, block_table: Tensor, *, block_size: int
) -> TopkIndices:
    """Translate every token's selected compressed rows to cache slots.

    Args:
        topk_indices: Selected rows inside the request, [num_tokens, topk], int32; negative entries
            are unused.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        block_table: Physical block of every logical block of the compressed cache, [num_reqs,
            max_blocks], int32, any strides.
        block_size: Compressed rows per block. At least 1.

    Returns:
        ``TopkIndices(indices, lens)``. ``indices``, int32 [num_tokens, topk], holds the slot of
        each entry in the entry's column; -1 for unused entries, rows past the table, negative
        blocks and slots beyond int32. ``lens``, int32 [num_tokens], is one past the last valid
        column. vLLM differs if a -1 lies between valid entries: vLLM 0.22 counts the valid entries
        but does not move them, so a reader of the first ``lens`` entries misses the last valid
        entries; vLLM 0.33 moves the valid entries to the front.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, ``block_size`` below 1, or several devices.
        TypeError: a dtype other than int32.

    Compile: decomposes to one kernel (masked load and a row maximum); dynamic in all tensor sizes;
        CUDA graphs and export: yes.

    Source: vLLM 0.33 ``compute_global_topk_indices_and_lens``.

    Example:
        >>> import torch, dsv4_ops
        >>> topk_indices = torch.tensor([[0, 64, -1, -1]], dtype=torch.int32)
        >>> block_table = torch.tensor([[10, 11]], dtype=torch.int32)
        >>> req_indices = torch.zeros(1, dtype=torch.int32)
        >>> result = dsv4_ops.global_topk_indices_and_lens(
        ...     topk_indices, req_indices, block_table, block_size=64
        ... )
        >>> result.indices.tolist(), result.lens.tolist()
        ([[640, 704, -1, -1]], [2])
    """
    checks = Checks("global_topk_indices_and_lens")
    checks.tensor("topk_indices", topk_indices, torch.int32, "num_tokens", "topk")
    checks.tensor("req_indices", req_indices, torch.int32, "num_tokens")
    checks.tensor("block_table", block_table, torch.int32, "num_reqs", "max_blocks")
    checks.at_least(1, block_size=block_size)
    rows = (topk_indices, req_indices, block_table)
    return TopkIndices(*_global_topk_indices_and_lens(*rows, block_size=block_size))


_dense_compressed_indices = define_op(
    "indices",
    "dense_compressed_indices(Tensor positions, Tensor req_indices, Tensor "
    "block_table, *, int block_size, "
    "int compress_ratio, int max_compressed) -> (Tensor, Tensor)",
    lowering={"cpu": "pointwise", "cuda": "pointwise"},
    dynamic=("num_tokens", "num_reqs", "max_blocks"),
    source="vLLM 0.33 build_c128a_topk_metadata; semantics re-derived",
    gradient=INTEGERS,
)


def dense_compressed_indices(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    compress_ratio: int,
    max_compressed: int,
) -> TopkIndices:
    """List the slots of all compressed rows that each token may see.

    C128 layers attend to these rows.

    Args:
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        block_table: Physical block of every logical block of the compressed cache, [num_reqs,
            max_blocks], int32, any strides.
        block_size: Compressed rows per block. At least 1.
        compress_ratio: Positions per compressed row. At least 1.
        max_compressed: Width of the result. Derive it from the configured maximum request length,
            not from the batch.

    Returns:
        ``TopkIndices(indices, lens)``: int32 [num_tokens, max_compressed] slots of rows 0, 1, ..,
        -1 past the visible rows; and int32 [num_tokens], min((position + 1) // compress_ratio,
        max_compressed). Padding tokens have a row of -1 and length 0. A row past the table, on a
        negative block or with a slot beyond int32 is -1.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, sizes out of range, or several devices.
        TypeError: a dtype other than those above.

    Compile: pointwise lowering (one masked table read per entry); dynamic in all tensor sizes; CUDA
        graphs and export: yes.

    Source: vLLM 0.33 ``build_c128a_topk_metadata``.

    Example:
        >>> import torch, dsv4_ops
        >>> block_table = torch.tensor([[4, 9]], dtype=torch.int32)
        >>> positions, req_indices = torch.tensor([383]), torch.zeros(1, dtype=torch.int32)
        >>> dsv4_ops.dense_compressed_indices(
        ...     positions,
        ...     req_indices,
        ...     block_table,
        ...     block_size=2,
        ...     compress_ratio=128,
        ...     max_compressed=4,
        ... ).indices.tolist()
        [[8, 9, 18, -1]]
    """
    checks = Checks("dense_compressed_indices")
    checks.tokens(positions, req_indices, block_table)
    sizes = {"compress_ratio": compress_ratio, "max_compressed": max_compressed}
    checks.at_least(1, block_size=block_size, **sizes)
    rows = (positions, req_indices, block_table)
    return TopkIndices(*_dense_compressed_indices(*rows, block_size=block_size, **sizes))


_combine_topk_swa_indices = define_op(
    "indices",
    "combine_topk_swa_indices(Tensor topk_indices, Tensor positions, Tensor "
    "req_indices, Tensor seq_lens, Tensor gather_lens, *, int window_size, int "
    "compress_ratio, int topk, int workspace_rows, int swa_offset) -> (Tensor, Tensor)",
    dynamic=("num_tokens", "num_reqs"),
    source="vLLM 0.33 combine_topk_swa_indices, with bounds and per-token requests",
    gradient=INTEGERS,
)


def combine_topk_swa_indices(
    topk_indices: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    *,
    window_size: int,
    compress_ratio: int,
    topk: int,
    workspace_rows: int,
    swa_offset: int,
) -> TopkIndices:
    """List the rows of a gathered workspace that each token attends to.

    The token's selected compressed rows come first, then the rows of its window.

    The workspace is [num_reqs, workspace_rows, 512], viewed as one list of rows. The compressed
    rows of request b start at b * workspace_rows. The window rows of request b, from
    ``dequantize_and_gather_k_cache``, start at b * workspace_rows + swa_offset.

    Args:
        topk_indices: Selected rows inside the request, [num_tokens, columns], int32; only the first
            ``topk`` columns are read. Entries outside 0..swa_offset-1 become holes (-1).
        positions: Absolute position of every token, [num_tokens], int64; values outside 0..2**31-2
            mark padding.
        req_indices: Request of every token, counted from the first request in the workspace,
            [num_tokens], int32; values outside 0..num_reqs-1 mark padding.
        seq_lens: Length of every request, [num_reqs], int32.
        gather_lens: Number of gathered window rows of each request, [num_reqs], int32. These rows
            are the request's last positions.
        window_size: Keys in a full window, including the token's own key. At least 1.
        compress_ratio: Positions per compressed row. At least 1.
        topk: Maximum selected rows per token; 0 for layers with only a window.
        workspace_rows: Rows of the workspace per request. At least 1.
        swa_offset: First window row of a request, counted from the start of the request's
            workspace. At least 0.

    Returns:
        ``TopkIndices(indices, lens)``. ``indices``, int32 [num_tokens, width], has -1 in holes and
        past the end; width is topk + window_size rounded up to a multiple of 128. ``lens``, int32
        [num_tokens], is the number of columns before the end, holes included: min((position + 1) //
        compress_ratio, topk) + min(position + 1, window_size). A column is a hole if its window row
        was not gathered or lies past the workspace, or if its index exceeds int32. Padding tokens
        have a row of -1 and length 0.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, fewer than ``topk`` columns, sizes out of range, or
            several devices.
        TypeError: a dtype other than those above.

    Compile: decomposes to one kernel; dynamic in num_tokens and num_reqs; CUDA graphs and export:
        yes.

    Source: vLLM 0.33 ``combine_topk_swa_indices``.

    Example:
        >>> import torch, dsv4_ops
        >>> i32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> result = dsv4_ops.combine_topk_swa_indices(
        ...     i32([[1, 0]]), torch.tensor([7]), i32([0]), i32([9]), i32([5]), window_size=4,
        ...     compress_ratio=4, topk=2, workspace_rows=20, swa_offset=8,
        ... )
        >>> result.indices[0, :7].tolist(), result.lens.tolist(), result.indices.shape[1]
        ([1, 0, 8, 9, 10, 11, -1], [6], 128)
    """
    checks = Checks("combine_topk_swa_indices")
    checks.tensor("topk_indices", topk_indices, torch.int32, "num_tokens", "columns")
    checks.tokens(positions, req_indices)
    checks.tensor("seq_lens", seq_lens, torch.int32, "num_reqs")
    checks.tensor("gather_lens", gather_lens, torch.int32, "num_reqs")
    sizes = {"window_size": window_size, "compress_ratio": compress_ratio}
    checks.at_least(1, workspace_rows=workspace_rows, **sizes)
    workspace = {"workspace_rows": workspace_rows, "swa_offset": swa_offset}
    checks.at_least(0, topk=topk, swa_offset=swa_offset)
    checks.columns("topk_indices", topk_indices, "topk", topk)
    tensors = (topk_indices, positions, req_indices, seq_lens, gather_lens)
    return TopkIndices(*_combine_topk_swa_indices(*tensors, topk=topk, **sizes, **workspace))


_mixed_sparse_indices = define_op(
    "indices",
    "mixed_sparse_indices(Tensor decode_swa_indices, Tensor? "
    "decode_compressed_indices, Tensor? decode_compressed_lens, Tensor prefill_topk_indices, "
    "Tensor positions, Tensor req_indices, Tensor swa_block_table, Tensor? "
    "compressed_block_table, *, int swa_block_size, int compressed_block_size, int "
    "window_size, int compress_ratio, int topk, bool decode_compressed_indices_are_local, "
    "int? swa_block_span, int? compressed_block_span) -> (Tensor, Tensor)",
    dynamic=("num_decode_tokens", "num_prefill_tokens", "num_reqs", "max_blocks"),
    source="vLLM 0.33 build_flashinfer_mixed_sparse_indices, with bounds and per-token requests",
    gradient=INTEGERS,
)


def mixed_sparse_indices(
    decode_swa_indices: Tensor,
    decode_compressed_indices: Tensor | None,
    decode_compressed_lens: Tensor | None,
    prefill_topk_indices: Tensor,
    positions: Tensor,
    req_indices: Tensor,
    swa_block_table: Tensor,
    compressed_block_table: Tensor | None,
    *,
    swa_block_size: int,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool = False,
    swa_block_span: int | None = None,
    compressed_block_span: int | None = None,
) -> TopkIndices:
    """Build one index matrix: rows of decode tokens first, then of prefill tokens.

    The matrix has FlashInfer's layout.

    Args:
        decode_swa_indices: Window slots of the decode tokens, [num_decode_tokens, swa_width],
            int32; swa_width is a multiple of 4 and at least ``window_size``. Negative entries are
            no slots.
        decode_compressed_indices: Compressed rows of the decode tokens, [num_decode_tokens,
            columns], int32: cache slots, or rows inside the request. None means that there are no
            compressed rows.
        decode_compressed_lens: Valid columns per decode token, [num_decode_tokens], int32. None
            means all columns if they hold cache slots, and the columns up to the last valid entry
            if they hold rows inside the request.
        prefill_topk_indices: Selected rows of the prefill tokens, inside the request,
            [num_prefill_tokens, columns], int32; only the first ``topk`` columns are read.
        positions: Absolute position of every token, [num_tokens], int64, num_tokens =
            num_decode_tokens + num_prefill_tokens; values outside 0..2**31-2 mark padding.
        req_indices: Request of every token, [num_tokens], int32; values outside 0..num_reqs-1 mark
            padding.
        swa_block_table: Physical block of every logical block of the window cache, [num_reqs,
            max_blocks], int32, any strides.
        compressed_block_table: The same for the compressed cache. With None, ``swa_block_table``
            serves both caches.
        swa_block_size: Rows per block of the window cache. At least 1.
        compressed_block_size: Rows per block of the compressed cache. At least 1.
        window_size: Keys in a full window. At least 1.
        compress_ratio: Positions per compressed row. At least 1.
        topk: Maximum selected rows per prefill token. At least 0.
        decode_compressed_indices_are_local: Whether ``decode_compressed_indices`` are rows inside
            the request.
        swa_block_span: Distance, in rows, between the starts of neighbouring blocks of the window
            cache, if blocks of several caches are packed together. None means ``swa_block_size``.
        compressed_block_span: The same for the compressed cache.

    Returns:
        ``TopkIndices(indices, lens)``. ``indices``, int32 [num_tokens, swa_width +
        compressed_width], has window slots first and -1 in holes; compressed_width is the larger of
        topk and the number of columns of ``decode_compressed_indices``, rounded up to the next
        multiple of 4. ``lens``, int32 [num_tokens], is swa_width plus the number of compressed
        columns in use: the entry of ``decode_compressed_lens`` for a decode token, min((position +
        1) // compress_ratio, topk) for a prefill token. The window always takes swa_width columns,
        unlike in ``combine_topk_swa_indices``. Slots past a table, on negative blocks or beyond
        int32 are holes. Padding tokens have a row of -1 and length 0.

    Mutates: nothing.

    Raises:
        ValueError: shapes that disagree, widths or sizes out of range, or several devices.
        TypeError: a dtype other than those above.

    Compile: decomposes to masked loads, a row maximum and a concatenation; dynamic in the tokens,
        num_reqs and table widths; CUDA graphs and export: yes.

    Source: vLLM 0.33 ``build_flashinfer_mixed_sparse_indices``.

    Example:
        >>> import torch, dsv4_ops
        >>> i32 = lambda values: torch.tensor(values, dtype=torch.int32)
        >>> result = dsv4_ops.mixed_sparse_indices(
        ...     i32([[130, 131, -1, -1]]), None, None, i32([[1, 0]]), torch.tensor([5, 7]),
        ...     i32([0, 1]), i32([[7, 3], [2, 5]]), None, swa_block_size=64,
        ...     compressed_block_size=64, window_size=4, compress_ratio=4, topk=2,
        ...     swa_block_span=73,
        ... )
        >>> result.indices.tolist()
        [[148, 149, -1, -1, -1, -1, -1, -1], [150, 151, 152, 153, 129, 128, -1, -1]]
        >>> result.lens.tolist()
        [4, 6]
    """
    checks = Checks("mixed_sparse_indices")
    int32 = torch.int32
    checks.tensor("decode_swa_indices", decode_swa_indices, int32, "num_decode_tokens", "swa_width")
    dims = ("num_decode_tokens", "compressed_width")
    checks.optional("decode_compressed_indices", decode_compressed_indices, int32, *dims)
    if decode_compressed_lens is not None:
        checks.comes_with(
            "decode_compressed_lens", "decode_compressed_indices", decode_compressed_indices
        )
        checks.tensor("decode_compressed_lens", decode_compressed_lens, int32, "num_decode_tokens")
    dims = ("num_prefill_tokens", "columns")
    checks.tensor("prefill_topk_indices", prefill_topk_indices, int32, *dims)
    checks.sizes["num_tokens"] = decode_swa_indices.shape[0] + prefill_topk_indices.shape[0]
    checks.owners["num_tokens"] = "decode_swa_indices and prefill_topk_indices"
    checks.tokens(positions, req_indices)
    checks.tensor("swa_block_table", swa_block_table, int32, "num_reqs", "max_blocks")
    dims = ("num_reqs", "max_compressed_blocks")
    checks.optional("compressed_block_table", compressed_block_table, int32, *dims)
    sizes = {"window_size": window_size, "compress_ratio": compress_ratio}
    sizes |= {"swa_block_size": swa_block_size, "compressed_block_size": compressed_block_size}
    checks.at_least(1, **sizes)
    checks.at_least(0, topk=topk)
    checks.flag("decode_compressed_indices_are_local", decode_compressed_indices_are_local)
    checks.columns("prefill_topk_indices", prefill_topk_indices, "topk", topk)
    checks.columns("decode_swa_indices", decode_swa_indices, "window_size", window_size)
    checks.columns_of("decode_swa_indices", decode_swa_indices, INDEX_ALIGNMENT)
    if swa_block_span is not None:
        checks.at_least(swa_block_size, swa_block_span=swa_block_span)
    if compressed_block_span is not None:
        checks.at_least(compressed_block_size, compressed_block_span=compressed_block_span)
    decode = (decode_swa_indices, decode_compressed_indices, decode_compressed_lens)
    prefill = (prefill_topk_indices, positions, req_indices)
    result = _mixed_sparse_indices(
        *decode,
        *prefill,
        swa_block_table,
        compressed_block_table,
        **sizes,
        topk=topk,
        decode_compressed_indices_are_local=decode_compressed_indices_are_local,
        swa_block_span=swa_block_span,
        compressed_block_span=compressed_block_span,
    )
    return TopkIndices(*result)
