"""Every error of every public function: its exact type and its exact text, eager and compiled.

A message reads ``{op}: {argument} must {rule}, got {actual}. {what to do}``.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4_ops as ops
from tests.helpers import i32, i64
from tests.ops.error_rows.all_rows import CALLABLES, ROWS, TABLE, Row, valid_arguments
from tests.ops.error_rows.cache import CONSTRUCTORS
from tests.ops.error_rows.wording import Entry

TEMPLATE = re.compile(r"(?P<op>\w+): \w+ must [^.].*, got [^,].*\. [A-Z].*[^. ]\.")
LIMIT = 16383


@pytest.mark.check
@pytest.mark.parametrize("op", CALLABLES)
def test_errors(op: str) -> None:
    """Of 5,800 rows; a test for each would take pytest half a minute."""
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


@pytest.mark.parametrize(("name", "call", "entry"), CONSTRUCTORS)
def test_error_of_what_makes_caches(name: str, call: Callable[[], Any], entry: Entry) -> None:
    with pytest.raises(entry.error) as caught:
        call()
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
    plan = ops.split_prefill_chunks(
        lens, lens, workspace_size=LIMIT, max_logits_bytes=2**40, max_chunks=1
    )
    assert plan.chunks.tolist() == [[0, LIMIT, 0, LIMIT]]


def test_as_many_tokens_in_a_plan_as_the_limit_allows() -> None:
    """All with one block of keys, but for the last with 8 times as many as all others. It comes
    first, in two splits where a quarter of the programs is one."""
    lens = torch.ones(LIMIT, dtype=torch.int32)
    lens[-1] = 64 * 8 * (LIMIT - 1)
    ones = i32([[token, 0, 1, 0] for token in range(LIMIT - 1)])
    for programs, splits in ((2, 1), (4, 2)):
        long = [[LIMIT - 1, split, splits, 0] for split in range(splits)]
        none = [[-1] * 4] * (programs + 1 - splits)
        plan = ops.sparse_mla_plan(lens, num_heads=64, num_programs=programs)
        assert torch.equal(plan, torch.cat([i32(long), ones, i32(none)]))


COMPILED = {
    "dtype": Row(
        "token_map",
        {"seq_lens": i64([9, 7, 4])},
        TypeError,
        "token_map: seq_lens must be torch.int32, got torch.int64. Cast it with .to(torch.int32).",
    ),
    "shape": Row(
        "compressed_slot_mapping",
        {"slot_mapping": i64([0, 1])},
        ValueError,
        "compressed_slot_mapping: slot_mapping must have shape [num_tokens] with num_tokens = 5 "
        "as in positions, got [2]. "
        "Make them agree: num_tokens counts the tokens of the padded batch.",
    ),
    "cache": Row(
        "quantize_and_insert_k_cache",
        {"k_cache": torch.zeros(4, 64 * 528, dtype=torch.uint8)},
        ValueError,
        "quantize_and_insert_k_cache: k_cache must have shape [num_blocks, 37440] for layout "
        "'v4_fp8' with block_size = 64, got [4, 33792]. "
        "Allocate it with MainLayout(block_size=64).allocate(num_blocks), or correct block_size.",
    ),
    "int": Row(
        "gather_k_cache",
        {"offset": 5},
        ValueError,
        "gather_k_cache: offset must be at most num_rows = 4, got 5. "
        "Lower offset, or raise num_rows.",
    ),
    "plan": Row(
        "sparse_mla_decode",
        {"batch_invariant": True},
        ValueError,
        "sparse_mla_decode: batch_invariant must be False with a plan, got True. "
        "Pass one of the two.",
    ),
    "rows for tokens": Row(
        "sparse_mla_decode_paged",
        {"plan": torch.zeros(4, 4, dtype=torch.int32)},
        ValueError,
        "sparse_mla_decode_paged: plan must have at least num_tokens = 5 rows as in q, got 4. "
        "Pass a row for every token.",
    ),
    "optional": Row(
        "sparse_mla_prefill",
        {"extra_cache": None},
        ValueError,
        "sparse_mla_prefill: extra_block_table must be None without extra_cache, got a tensor. "
        "Pass both or neither.",
    ),
    "int64": Row(
        "split_prefill_chunks",
        {"workspace_size": 2**63},
        ValueError,
        f"split_prefill_chunks: workspace_size must be at most {2**63 - 1}, got {2**63}. "
        "Numbers are int64.",
    ),
    "limit": Row(
        "sparse_mla_plan",
        {"swa_lens": torch.zeros(16384, dtype=torch.int32), "extra_lens": None},
        ValueError,
        "sparse_mla_plan: num_tokens must be at most 16383, got 16384. Split the batch.",
    ),
}


@pytest.mark.parametrize(
    ("row", "dynamic"),
    [*((row, None) for row in COMPILED.values()), (COMPILED["int"], True)],
    ids=[*COMPILED, "symbolic int"],
)
def test_error_under_compile(row: Row, dynamic: bool | None) -> None:
    """Dynamo wraps what a traced function raises; its message names and quotes the error."""
    torch.compiler.reset()
    call = CALLABLES[row.op]
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    wrapped = (row.error, torch._dynamo.exc.Unsupported)
    with pytest.raises(wrapped, match=re.escape(row.message)) as caught:
        compiled(**{**valid_arguments(row.op), **row.spoiled})
    assert row.error.__name__ in f"{type(caught.value).__name__}: {caught.value}"
