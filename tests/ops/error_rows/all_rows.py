"""Wrong calls of every public function and their errors; ``test_errors.py`` makes the calls.

``TABLE`` spells out what differs from function to function, with the rows of other stems in
the files beside it; ``generated_rows`` adds what all arguments of a kind have in common.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

import dsv4_ops as ops
from dsv4_ops.attention.metadata import AttentionSpec
from dsv4_ops.core.registry import OPS
from tests.helpers import i32, i64
from tests.ops.error_rows.c4_step import C4_TABLE
from tests.ops.error_rows.cache import CACHE_TABLE
from tests.ops.error_rows.compressor import COMPRESSOR_TABLE
from tests.ops.error_rows.context import CONTEXT_TABLE
from tests.ops.error_rows.dense_mla import DENSE_MLA_TABLE
from tests.ops.error_rows.draft import DRAFT_TABLE
from tests.ops.error_rows.experts import EXPERTS_TABLE
from tests.ops.error_rows.indexer import INDEXER_TABLE
from tests.ops.error_rows.linear import LINEAR_TABLE
from tests.ops.error_rows.metadata import METADATA_TABLE
from tests.ops.error_rows.mla import MLA_TABLE
from tests.ops.error_rows.prefill import PREFILL_TABLE
from tests.ops.error_rows.rope import ROPE_TABLE
from tests.ops.error_rows.schedule import SCHEDULE_TABLE
from tests.ops.error_rows.sinkhorn import SINKHORN_TABLE
from tests.ops.error_rows.sparse import SPARSE_TABLE
from tests.ops.error_rows.valid import (
    COUNTS,
    MINIMUM,
    ORDER,
    SUMS,
    TENSORS,
    valid_tensor,
    valid_value,
)


class Row(NamedTuple):
    """One wrong call: what to change in a valid one, and the error that it gives."""

    what: str
    op: str
    spoiled: dict[str, Any]
    error: type[Exception]
    message: str

    @property
    def id(self) -> str:
        return f"{self.op}: {self.what}"


COLLECTIVES = ("cp_combine", "cp_gather_heads", "cp_gather_rows")
"""Functions that need a process group; ``test_collectives.py`` has their errors."""
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: function
    for name, function in ((name, getattr(ops, name)) for name in ops.__all__)
    if name not in COLLECTIVES
    if callable(function) and not (inspect.isclass(function) and issubclass(function, tuple))
}
CALLABLES: dict[str, Callable[..., Any]] = {**FUNCTIONS, "AttentionSpec": AttentionSpec}

TENSOR_KINDS = ("Tensor", "Tensor | None")
INT_KINDS = ("int", "int | None")
DTYPES = (torch.int32, torch.int64, torch.float32, torch.bool)
NONE, FEW, MANY = i32([]), i32([1, 1]), torch.zeros(16384, dtype=torch.int32)
MANY_STARTS = torch.zeros(16385, dtype=torch.int32)

REQS_AGREE = (
    "Make them agree: num_reqs counts the requests of the batch, padding requests included."
)
NO_START = (
    "query_start_loc must have shape [num_reqs + 1], got [0]. "
    "Pass at least 1 entry, even for an empty batch."
)
FEW_LENS = (
    "seq_lens must have shape [num_reqs] with num_reqs = 3 as in query_start_loc, got [2]. "
    f"{REQS_AGREE}"
)
FEW_TOKENS = (
    "req_indices must have shape [num_tokens] with num_tokens = 5 as in positions, "
    "got [2]. Make them agree: num_tokens counts the tokens of the padded batch."
)
TOO_MANY = "num_reqs must be at most 16383, got 16384. Split the batch."

# op -> what, spoiled arguments, error, message behind the name of the op
TABLE: dict[str, list[tuple[str, dict[str, Any], type[Exception], str]]] = {
    "split_decodes_and_prefills": [
        ("no entry", {"query_start_loc": NONE}, ValueError, NO_START),
        ("too many requests", {"query_start_loc": MANY_STARTS}, ValueError, TOO_MANY),
        (
            "an int as flag",
            {"require_uniform": 1},
            TypeError,
            "require_uniform must be a bool, got int. Pass True or False.",
        ),
        (
            "no flag",
            {"require_uniform": None},
            TypeError,
            "require_uniform must be a bool, got NoneType. Pass True or False.",
        ),
    ],
    "token_map": [
        (
            "scalar",
            {"query_start_loc": torch.tensor(3, dtype=torch.int32)},
            ValueError,
            "query_start_loc must have shape [num_reqs + 1], got []. Pass a tensor of 1 dimension.",
        ),
        ("no entry", {"query_start_loc": NONE, "seq_lens": NONE}, ValueError, NO_START),
        ("too few lengths", {"seq_lens": FEW}, ValueError, FEW_LENS),
        (
            "too many requests",
            {"query_start_loc": MANY_STARTS, "seq_lens": MANY},
            ValueError,
            TOO_MANY,
        ),
        (
            "all but the first on another device",
            {"query_start_loc": TENSORS["query_start_loc"].value.to("meta")},
            ValueError,
            "seq_lens must be on meta like query_start_loc, got cpu. "
            "Move all tensors of a call to one device.",
        ),
    ],
    "flatten_decode": [
        ("no entry", {"query_start_loc": NONE}, ValueError, NO_START),
        ("too few lengths", {"seq_lens": FEW}, ValueError, FEW_LENS),
        (
            "too many requests",
            {"query_start_loc": MANY_STARTS, "seq_lens": MANY},
            ValueError,
            TOO_MANY,
        ),
    ],
    "expand_block_table": [
        (
            "not a table",
            {"block_table": FEW},
            ValueError,
            "block_table must have shape [num_reqs, max_blocks], got [2]. "
            "Pass a tensor of 2 dimensions.",
        ),
        (
            "a column of requests",
            {"req_indices": FEW[:, None]},
            ValueError,
            "req_indices must have shape [num_tokens], got [2, 1]. Pass a tensor of 1 dimension.",
        ),
    ],
    "mtp_seq_lens": [
        ("no entry", {"query_start_loc": NONE}, ValueError, NO_START),
        ("too few lengths", {"seq_lens": FEW}, ValueError, FEW_LENS),
    ],
    "compressed_slot_mapping": [
        ("too few requests of tokens", {"req_indices": FEW}, ValueError, FEW_TOKENS),
        (
            "too few slots",
            {"slot_mapping": i64([0, 1])},
            ValueError,
            FEW_TOKENS.replace("req_indices", "slot_mapping"),
        ),
        (
            "a turn of no whole rows",
            {"cp_interleave": 6},
            ValueError,
            "cp_interleave must be a multiple of compress_ratio = 4, got 6. Use cp_interleave = 8.",
        ),
        (
            "a turn shorter than a row",
            {"cp_interleave": 1, "compress_ratio": 128},
            ValueError,
            "cp_interleave must be a multiple of compress_ratio = 128, got 1. "
            "Use cp_interleave = 128.",
        ),
    ],
    "split_prefill_chunks": [
        (
            "too few queries",
            {"query_lens": FEW},
            ValueError,
            "query_lens must have shape [num_reqs] with num_reqs = 3 as in seq_lens, got [2]. "
            f"{REQS_AGREE}",
        ),
        ("too many requests", {"seq_lens": MANY, "query_lens": MANY}, ValueError, TOO_MANY),
    ],
    "plan_prefill_chunks": [
        (
            "negative rows",
            {"seq_lens": [3, -4, 5]},
            ValueError,
            "seq_lens must be non-negative, got -4 at index 1. Give padding requests length 0.",
        ),
        (
            "negative queries in a tensor",
            {"query_lens": i32([3, 0, -1])},
            ValueError,
            "query_lens must be non-negative, got -1 at index 2. Give padding requests length 0.",
        ),
        (
            "too few queries",
            {"seq_lens": [7], "query_lens": []},
            ValueError,
            "query_lens must have as many entries as seq_lens (1), got 0. "
            "Pass one length per request in both.",
        ),
        (
            "too many queries",
            {"query_lens": (1, 2, 3, 4)},
            ValueError,
            "query_lens must have as many entries as seq_lens (3), got 4. "
            "Pass one length per request in both.",
        ),
    ],
    "max_prefill_chunks": [
        (
            "no room for one logit",
            {"max_logits_bytes": 0},
            ValueError,
            "max_logits_bytes must be at least 4, got 0. Pass 4 or more.",
        ),
    ],
    "prefill_row_bounds": [
        (
            "too many requests of tokens",
            {"req_indices": i32([0] * 6)},
            ValueError,
            FEW_TOKENS.replace("[2]", "[6]"),
        ),
    ],
    "prefill_chunk_row_bounds": [
        ("too few requests of tokens", {"req_indices": FEW}, ValueError, FEW_TOKENS),
        (
            "too few starts",
            {"query_start_loc": i32([0, 2, 4])},
            ValueError,
            "query_start_loc must have shape [num_reqs + 1] with num_reqs = 3 as in seq_lens, "
            f"got [3]. {REQS_AGREE}",
        ),
        ("no start", {"query_start_loc": NONE, "seq_lens": NONE}, ValueError, NO_START),
        (
            "half a chunk",
            {"chunk": FEW},
            ValueError,
            "chunk must have shape [4], got [2]. Pass exactly 4 entries in dimension 0.",
        ),
        (
            "a plan, not a chunk",
            {"chunk": i32([[0, 3, 0, 5]])},
            ValueError,
            "chunk must have shape [4], got [1, 4]. Pass a tensor of 1 dimension.",
        ),
    ],
    "swa_indices_and_lens": [
        ("too few requests of tokens", {"req_indices": FEW}, ValueError, FEW_TOKENS),
    ],
    "prefill_gather_lens": [
        ("no entry", {"query_start_loc": NONE}, ValueError, NO_START),
        ("too few lengths", {"seq_lens": FEW}, ValueError, FEW_LENS),
    ],
    "global_topk_indices_and_lens": [
        (
            "too few requests of tokens",
            {"req_indices": FEW},
            ValueError,
            FEW_TOKENS.replace("positions", "topk_indices"),
        ),
        (
            "one selection",
            {"topk_indices": FEW},
            ValueError,
            "topk_indices must have shape [num_tokens, topk], got [2]. "
            "Pass a tensor of 2 dimensions.",
        ),
    ],
    "dense_compressed_indices": [
        ("too few requests of tokens", {"req_indices": FEW}, ValueError, FEW_TOKENS),
    ],
    **C4_TABLE,
    **CACHE_TABLE,
    **COMPRESSOR_TABLE,
    **CONTEXT_TABLE,
    **DENSE_MLA_TABLE,
    **DRAFT_TABLE,
    **EXPERTS_TABLE,
    **INDEXER_TABLE,
    **LINEAR_TABLE,
    **METADATA_TABLE,
    **MLA_TABLE,
    **PREFILL_TABLE,
    **ROPE_TABLE,
    **SCHEDULE_TABLE,
    **SINKHORN_TABLE,
    **SPARSE_TABLE,
}


def valid_arguments(op: str) -> dict[str, Any]:
    """Arguments that the function takes, to spoil some of."""
    if op == "AttentionSpec":
        return {}
    parameters = inspect.signature(FUNCTIONS[op]).parameters.values()
    return {each.name: valid_value(op, each.name, each.default) for each in parameters}


def table_rows() -> Iterator[Row]:
    for op, entries in TABLE.items():
        for what, spoiled, error, text in entries:
            yield Row(what, op, spoiled, error, f"{op}: {text}")


def generated_rows() -> Iterator[Row]:
    """Every tensor and every int of every function, spoiled in every way that its kind can be."""
    for op, function in CALLABLES.items():
        parameters = inspect.signature(function).parameters.values()
        kinds = {each.name: each.annotation for each in parameters}
        order = ORDER.get(op) or [name for name in kinds if kinds[name] in TENSOR_KINDS]
        for name, kind in kinds.items():
            if kind in TENSOR_KINDS:
                yield from tensor_rows(op, name, order[0], optional=kind.endswith("None"))
            elif kind in INT_KINDS:
                yield from int_rows(op, name, optional=kind.endswith("None"))
            elif name == "impl":
                yield from impl_rows(op)
        yield from size_rows(op, order)


def tensor_rows(op: str, name: str, first: str, *, optional: bool) -> Iterator[Row]:
    value, shape, dtypes, for_layout, advice, any_rank = valid_tensor(op, name)
    dtype, rank = value.dtype, value.dim()
    for other in (value.tolist(), 3) if optional else (value.tolist(), None, 3):
        kind = type(other).__name__
        text = f"{op}: {name} must be a tensor, got {kind}. {advice or f'Pass a {dtype} tensor.'}"
        yield Row(f"{name} is {kind}", op, {name: other}, TypeError, text)
    sparse = torch.sparse_coo_tensor(
        torch.zeros(rank, 0, dtype=torch.int64), torch.zeros(0, dtype=dtype), value.shape
    )
    text = f"{op}: {name} must be a dense tensor, got a torch.sparse_coo. "
    text += "Pass .to_dense() of a sparse one, or .values() of a nested one."
    yield Row(f"{name} is sparse", op, {name: sparse}, TypeError, text)
    dtypes = dtypes or str(dtype)
    for wrong in DTYPES:
        if str(wrong) in dtypes:
            continue
        text = f"{op}: {name} must be {dtypes}{for_layout}, got {wrong}. "
        text += advice or f"Cast it with .to({dtype})."
        yield Row(f"{name} is {wrong}", op, {name: value.to(wrong)}, TypeError, text)
    plural = "" if rank == 1 else "s"
    for other in () if any_rank else (value[None], value[0]):
        text = f"{op}: {name} must have shape {shape}, got {list(other.shape)}. "
        text += f"Pass a tensor of {rank} dimension{plural}."
        yield Row(f"{name} of rank {other.dim()}", op, {name: other}, ValueError, text)
    if name != first:
        text = f"{op}: {name} must be on cpu like {first}, got meta. "
        text += "Move all tensors of a call to one device."
        yield Row(f"{name} elsewhere", op, {name: value.to("meta")}, ValueError, text)


def size_rows(op: str, order: Iterable[str]) -> Iterator[Row]:
    """Tensors with one entry more than the tensors before them say, or than there may be."""
    owners = dict(SUMS.get(op, {}))
    for name in order:
        value, shape = valid_tensor(op, name)[:2]
        for axis, dim in enumerate(shape[1:-1].split(", ")):
            word, size = dim.partition(" + ")[0], value.shape[axis]
            longer = torch.cat([value, value.narrow(axis, 0, 1)], axis)
            got = f"got {list(longer.shape)}"
            if dim.isdigit():
                text = f"{got}. Pass exactly {dim} entries in dimension {axis}."
            elif owners.setdefault(word, name) != name:
                size -= dim.endswith(" + 1")
                text = f"with {word} = {size} as in {owners[word]}, {got}. "
                text += f"Make them agree: {word} counts {COUNTS[word]}."
            else:
                continue
            text = f"{op}: {name} must have shape {shape}{',' if dim.isdigit() else ''} {text}"
            yield Row(f"{name} too long in {axis}", op, {name: longer}, ValueError, text)


def int_rows(op: str, name: str, *, optional: bool) -> Iterator[Row]:
    for value in (True, 2.0, torch.tensor(2), "2", None):
        if optional and value is None:
            continue
        kind = type(value).__name__
        text = f"{op}: {name} must be an int, got {kind}. "
        text += "Pass a Python int that is known on the host, never a tensor."
        yield Row(f"{name} is {kind}", op, {name: value}, TypeError, text)
    least = MINIMUM.get(name, 1)
    for low in (least - 1, -(2**40)) if op != "AttentionSpec" else (least - 1,):
        text = f"{op}: {name} must be at least {least}, got {low}. Pass {least} or more."
        yield Row(f"{name} is {low}", op, {name: low}, ValueError, text)
    long = ("max_context_tokens", "max_logits_bytes", "workspace_size")
    most = 2**63 - 1 if name in long else 2**31 - 1
    why = "Indices are int32, so that larger ones address nothing."
    for high in (most + 1, 2**80):
        text = f"{op}: {name} must be at most {most}, got {high}. "
        text += why if most == 2**31 - 1 else "Numbers are int64."
        yield Row(f"{name} is {high}", op, {name: high}, ValueError, text)


def impl_rows(op: str) -> Iterator[Row]:
    """Executions that there are not, or not on CPU."""
    impls = [repr(impl) for impl in ("auto", *OPS[op].providers)]
    allowed = ", ".join(impls[:-1]) + f" or {impls[-1]}"
    text = f"{op}: impl must be a str, got NoneType. Pass {allowed}."
    yield Row("impl is None", op, {"impl": None}, TypeError, text)
    text = f"{op}: impl must be {allowed}, got 'cutlass'. Pass one of these."
    yield Row("an unknown impl", op, {"impl": "cutlass"}, ValueError, text)
    for impl in sorted({*OPS[op].providers} - {"reference"}):
        text = f"{op}: impl must be 'auto' or 'reference' on cpu, got {impl!r}. "
        text += "Move the tensors to a CUDA device."
        yield Row(f"impl {impl} on CPU", op, {"impl": impl}, RuntimeError, text)


ROWS = [*table_rows(), *generated_rows()]
