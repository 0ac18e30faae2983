"""Every error of every public function: its exact type and its exact text, eager and compiled.

A message reads ``{op}: {argument} must {rule}, got {actual}. {what to do}``.
"""

import inspect
import re

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from tests.helpers import i32
from tests.ops.error_rows.all_rows import CALLABLES, ROWS, TABLE, Row, valid_arguments
from tests.ops.error_rows.cache import MAKER_ROWS, MAKERS
from tests.ops.error_rows.wording import Entry

TEMPLATE = re.compile(r"(?P<op>\w+): \w+ must [^.].*, got [^,].*\. [A-Z].*[^. ]\.")
LIMIT = 16383


@pytest.mark.check
@pytest.mark.parametrize("op", CALLABLES)
def test_errors(op: str) -> None:
    """There are 6,200 rows; a test for each would take pytest half a minute."""
    wrong = {}
    for row in ROWS:
        if row.op == op:
            try:
                check(row)
            except (Exception, pytest.fail.Exception) as error:
                wrong[row.message] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{message}: {error}" for message, error in wrong.items())


def check(row: Row) -> None:
    arguments = {**valid_arguments(row.op), **row.spoiled}
    before = {
        name: (value.clone(), value._version)
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.layout is torch.strided
    }
    with pytest.raises(row.error) as caught:
        CALLABLES[row.op](**arguments)
    assert type(caught.value) is row.error
    assert str(caught.value) == row.message
    for name, (copy, version) in before.items():
        value = arguments[name]
        assert value._version == version, f"{name} was written to"
        assert value.is_meta or torch.equal(value, copy), f"{name} was written to"


@pytest.mark.parametrize("op", CALLABLES)
def test_the_call_is_right_before_it_is_spoiled(op: str) -> None:
    CALLABLES[op](**valid_arguments(op))


def test_every_public_function_has_rows() -> None:
    assert set(TABLE) <= set(CALLABLES)
    assert {row.op for row in ROWS} == set(CALLABLES)


@pytest.mark.parametrize("op", CALLABLES)
def test_every_argument_has_a_row(op: str) -> None:
    spoiled = {name for row in ROWS if row.op == op for name in row.spoiled}
    assert spoiled == set(inspect.signature(CALLABLES[op]).parameters)


def test_every_message_follows_the_template() -> None:
    for row in ROWS:
        found = TEMPLATE.fullmatch(row.message)
        assert found is not None, row.message
        assert found["op"] == row.op


@pytest.mark.parametrize(("name", "entry"), MAKER_ROWS)
def test_error_of_what_makes_caches(name: str, entry: Entry) -> None:
    with pytest.raises(entry.error) as caught:
        MAKERS[name](**entry.spoiled)
    assert type(caught.value) is entry.error
    assert str(caught.value) == f"{name}: {entry.text}"
    assert TEMPLATE.fullmatch(str(caught.value))


def test_as_many_requests_as_the_limit_allows() -> None:
    starts = torch.arange(LIMIT + 1, dtype=torch.int32)
    lens = torch.ones(LIMIT, dtype=torch.int32)
    split = ops.split_decodes_and_prefills(starts, decode_threshold=1)
    assert split.tolist() == [LIMIT, 0, LIMIT, 0]
    mapped = ops.token_map(starts, lens, num_tokens=LIMIT + 1)
    assert mapped.req_indices.tolist() == [*range(LIMIT), -1]
    flat = ops.flatten_decode(starts, lens, num_tokens=LIMIT)
    assert flat.req_indices.tolist() == list(range(LIMIT))
    sizes = {"workspace_size": LIMIT, "max_logits_bytes": 2**40, "max_chunks": 1}
    assert ops.split_prefill_chunks(lens, lens, **sizes).chunks.tolist() == [[0, LIMIT, 0, LIMIT]]


def test_as_many_tokens_in_a_plan_as_the_limit_allows() -> None:
    """The last token has 8 times as many blocks of keys as all others together, which have one
    each. The plan has this token first, in two splits if a quarter of the programs is not 0."""
    lens = torch.ones(LIMIT, dtype=torch.int32)
    lens[-1] = 64 * 8 * (LIMIT - 1)
    ones = i32([[token, 0, 1, 0] for token in range(LIMIT - 1)])
    for programs, splits in ((2, 1), (4, 2)):
        long = [[LIMIT - 1, split, splits, 0] for split in range(splits)]
        none = [[-1] * 4] * (programs + 1 - splits)
        plan = ops.sparse_mla_plan(lens, num_heads=64, num_programs=programs)
        assert torch.equal(plan, torch.cat([i32(long), ones, i32(none)]))


COMPILED = {
    "dtype": "token_map: seq_lens must be torch.int32, got torch.int64.",
    "shape": "compressed_slot_mapping: slot_mapping must have shape [num_tokens] with num_tokens =",
    "cache": "quantize_and_insert_k_cache: k_cache must have shape [num_blocks, 37440] for layout",
    "int": "gather_k_cache: offset must be at most num_rows = 4, got 5.",
    "plan": "sparse_mla_decode: batch_invariant must be False with a plan",
    "rows for tokens": "sparse_mla_decode_paged: plan must have at least num_tokens = 5 rows",
    "optional": "sparse_mla_prefill: extra_block_table must be None without extra_cache",
    "int64": f"split_prefill_chunks: workspace_size must be at most {2**63 - 1}",
    "limit": "sparse_mla_plan: num_tokens must be at most 16383",
}
"""The beginning of a message in ``ROWS`` for each kind of error."""


@pytest.mark.parametrize(("kind", "dynamic"), [*((kind, None) for kind in COMPILED), ("int", True)])
def test_error_under_compile(kind: str, dynamic: bool | None) -> None:
    """Dynamo wraps what a traced function raises; its message names and quotes the error."""
    row = next(row for row in ROWS if row.message.startswith(COMPILED[kind]))
    torch.compiler.reset()
    compiled = torch.compile(CALLABLES[row.op], fullgraph=True, backend="eager", dynamic=dynamic)
    wrapped = (row.error, torch._dynamo.exc.Unsupported)
    with pytest.raises(wrapped, match=re.escape(row.message)) as caught:
        compiled(**{**valid_arguments(row.op), **row.spoiled})
    assert row.error.__name__ in f"{type(caught.value).__name__}: {caught.value}"
