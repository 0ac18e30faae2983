"""FlashMLA for ``sparse_mla_prefill``, with a fake that refuses arguments that FlashMLA would
misread: by hand, over sampled and adversarial calls, and errors.
tests/gpu/test_providers_prefill.py runs the library."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import dsv4_ops as ops
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import choice, prefill, providers
from dsv4_ops.reference.bf16_workspace import Prefill, Source, find_spans, list_rows
from dsv4_ops.testing.case import Case
from tests.helpers import INT32_MAX, INT32_MIN, assert_right, i32, i64, nightly
from tests.support.attention_batches import generator, integers
from tests.support.prefill_batches import MODES, PREFILL, prefill_case
from tests.support.providers_on_cpu import CASES, call, message
from tests.support.sampled import sampled

pytest_plugins = ("tests.support.providers_on_cpu",)

SMALL = {"longest": 300, "max_reqs": 2, "window": 70, "topk": 70}
SETTINGS = {"softmax_scale": 1.0, "window_size": 2, "compress_ratio": 2}
SETTINGS |= {"swa_block_size": 1, "extra_block_size": 1}
PLACES = {name: place for place, name in enumerate(OPS[PREFILL].parameters[:9])}


def but(case: Case, **changed: Tensor | None) -> Case:
    tensors = list(case.tensors)
    for name, value in changed.items():
        tensors[PLACES[name]] = value
    return Case(case.name, tuple(tensors), case.settings)


def agrees(case: Case) -> None:
    assert_right(PREFILL, case, call(PREFILL, case, impl="flash_mla"))


def test_what_is_gathered_by_hand():
    """The window is 3; tokens are at positions 5, 9 and 1; a row holds two positions. A request
    without tokens has no rows, and a token past its table has no window keys."""
    table = torch.zeros(4, 5, dtype=torch.int32)
    source = Source(torch.empty(7, 0), table, 2)
    positions, requests = i64([9, 5, 1, -1, 40, 7, 3]), i32([0, 0, 2, 0, 3, 9, -1])
    made = Prefill(positions, requests, source, source, None, 3, 2)
    spans = find_spans(made)
    assert spans.ends.tolist() == [10, 0, 2, 10]
    assert spans.counts.tolist() == [7, 0, 2, 0]
    assert spans.compressed.tolist() == [5, 0, 1, 10]
    slots, lens = list_rows(made, spans, 8)
    assert slots.shape == (7, 16)  # 3 tokens of the window, and 10
    # rows 0..9 are compressed rows of the request; 10 is the first window key: position 3
    assert slots[0].tolist() == [14, 15, 16, 0, 1, 2, 3, 4, *[-1] * 8]
    assert slots[1].tolist() == [10, 11, 12, 0, 1, 2, *[-1] * 10]
    assert slots[2].tolist() == [-1, 50, 51, 40, *[-1] * 12]
    assert slots[4].tolist() == [-1] * 3 + list(range(60, 70)) + [-1] * 3
    assert lens.tolist() == [8, 6, 4, 0, 13, 0, 0]
    assert not (slots[[3, 5, 6]] >= 0).any()


@pytest.mark.parametrize("heads", [64, *nightly("64 heads", 128)])
@pytest.mark.parametrize("mode", MODES)
def test_the_adapter_gives_what_the_reference_gives(mode, heads, flash_mla):
    """Calls have ragged requests, padding, absent blocks, NaN in unused blocks, sinks of inf."""
    for seed, tokens in ((0, 40), (1, 1), (2, 9)):
        agrees(prefill_case(seed, tokens, heads, mode, **SMALL))
    assert flash_mla.calls == ["prefill"] * 3


@pytest.mark.parametrize("window", [1, 64, 129])
@pytest.mark.parametrize("block", [1, 53, 256])
def test_windows_and_page_sizes(window, block, flash_mla):
    agrees(prefill_case(3, 12, 64, "C4", window=window, block=block, longest=300, topk=1))


@sampled(200, 25)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(list(MODES)),
    tokens=st.sampled_from((1, 2, 5, 9)),
    window=st.sampled_from((1, 2, 5, 200)),
    block=st.sampled_from((1, 4, 64)),
    max_reqs=st.sampled_from((1, 3)),
)
def test_adversarial_calls(flash_mla, seed, mode, tokens, window, block, max_reqs):
    """Half of all integers are replaced at random; many of the new integers name nothing. Blocks
    that no table named before hold no NaN here."""
    sizes = {"window": window, "block": block, "max_reqs": max_reqs}
    case = prefill_case(seed % 1000, tokens, 64, mode, longest=100, topk=3, cache_seed=1, **sizes)
    made = generator(seed)

    def mixed(tensor: Tensor, *values: int) -> Tensor:
        pool = torch.tensor([*values, *range(-1, 9)], dtype=tensor.dtype)
        wild = pool[integers(made, 0, len(pool), *tensor.shape).long()]
        keep = torch.rand(tensor.shape, generator=made) < 0.5
        return torch.where(keep, tensor, wild)

    bad = (INT32_MIN, INT32_MAX)
    changed = {
        "positions": mixed(case.tensors[2], *bad, INT32_MAX - 1, 2**40, -(2**63), 2**63 - 1, 99),
        "req_indices": mixed(case.tensors[3], *bad),
        "swa_block_table": mixed(case.tensors[4], *bad),
    }
    changed["swa_cache"] = torch.where(case.tensors[1] == 0xFF, 0, case.tensors[1])
    if case.tensors[5] is not None:
        changed["extra_cache"] = torch.where(case.tensors[5] == 0xFF, 0, case.tensors[5])
        changed["extra_block_table"] = mixed(case.tensors[6], *bad)
    if case.tensors[7] is not None:
        changed["topk_indices"] = mixed(case.tensors[7], *bad, 25, 24)
    agrees(but(case, **changed))


@pytest.mark.parametrize("name", CASES)
def test_queries_at_any_address(name, flash_mla):
    """The library reads queries in units of 16 bytes; dense queries may be unaligned."""
    case = CASES[name](1)
    q = case.tensors[0]
    moved = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    assert moved.is_contiguous()
    assert moved.data_ptr() % 16 == 2
    tensors = (moved, *case.tensors[1:])
    expected = call(name, case, impl="flash_mla")
    actual = call(name, Case(name, tensors, case.settings), impl="flash_mla")
    assert all(map(torch.equal, actual, expected))


def test_batches_and_tables_of_nothing(flash_mla):
    case = prefill_case(3, 5, 64, "C128", **SMALL)
    per_token = {name: case.tensors[PLACES[name]][:0] for name in ("q", "positions", "req_indices")}
    out, lse = call(PREFILL, but(case, **per_token), impl="flash_mla")
    assert (out.shape, lse.shape) == ((0, 64, 512), (0, 64))
    assert flash_mla.calls == []
    tables = ("swa_block_table", "extra_block_table")
    given = dict(zip(PLACES, case.tensors, strict=True))
    for changed in (
        {name: given[name][:0] for name in tables},  # no requests
        {name: given[name][:, :0] for name in tables},
        {"swa_block_table": given["swa_block_table"][:, :0]},
        {"extra_block_table": given["extra_block_table"][:, :0]},
        {name: given[name][:0] for name in ("swa_cache", "extra_cache")},  # no blocks
    ):
        agrees(but(case, **changed))


def wide(case: Case, requests: int, swa: int, extra: int) -> Case:
    """Return the call with wider tables, filled with the first block."""
    tables = {"swa_block_table": swa, "extra_block_table": extra}
    sizes = {name: torch.zeros(requests, count).int() for name, count in tables.items()}
    return but(case, **sizes)


ROOM = (
    "sparse_mla_prefill: impl must be 'auto', 'triton' or 'reference' with block tables of 1048704 "
    "rows, got 'flash_mla'. FlashMLA takes up to 1048576 rows of all requests."
)


def test_a_workspace_that_is_too_large_is_refused(on_cpu, monkeypatch):
    """2 requests of 2^18 window rows and as many compressed rows fit; one more block does not."""
    case = prefill_case(0, 2, 64, "C4", **SMALL)
    large = wide(case, 2, 4096, 4097)
    assert message(NotImplementedError, PREFILL, large, impl="flash_mla") == ROOM
    assert choice.limit(PREFILL, "flash_mla", values_of(wide(case, 2, 4096, 4096))) is None
    monkeypatch.setattr(choice, "unusable", lambda library: "")
    found = providers.choice_of(PREFILL, *large.tensors, **case.settings)
    advice = "FlashMLA takes up to 1048576 rows of all requests"
    assert found == ("triton", f"{advice}: the call is with block tables of 1048704 rows")


def test_an_exported_program_has_room_for_no_more_rows(flash_mla):
    case = prefill_case(0, 6, 64, "C4", **SMALL)

    class Call(torch.nn.Module):
        def forward(self, *tensors):
            return tuple(ops.sparse_mla_prefill(*tensors, **case.settings, impl="flash_mla"))

    dynamic = [None] * len(PLACES)
    for name in ("swa_block_table", "extra_block_table"):
        dynamic[PLACES[name]] = {1: torch.export.Dim(name, min=2)}
    few = wide(case, 2, 5, 4)
    program = torch.export.export(Call(), few.tensors, dynamic_shapes=(tuple(dynamic),))
    assert_right(PREFILL, few, program.module()(*few.tensors))
    with pytest.raises(NotImplementedError) as error:
        program.module()(*wide(case, 2, 4096, 4097).tensors)
    assert str(error.value) == ROOM


def values_of(case: Case) -> dict[str, object]:
    return OPS[PREFILL].arguments(case.tensors, case.settings)


def test_layouts_that_flash_mla_does_not_read_are_refused(on_cpu):
    q = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    cache = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    tensors = (q, cache, i64([0]), i32([0]), i32([[0]]))
    case = Case("plain", tensors, {**SETTINGS, "layout": "plain"})
    assert message(NotImplementedError, PREFILL, case, impl="flash_mla") == (
        "sparse_mla_prefill: impl must be 'auto', 'triton' or 'reference' with layout 'plain', got "
        "'flash_mla'. FlashMLA reads the layout 'v4_fp8'."
    )


def test_size_of_a_copy():
    """The copy has a window key per token, the ``window_size - 1`` keys before each request's first
    token, and all compressed rows in the block tables."""
    case = wide(prefill_case(0, 40, 64, "C4", **SMALL), 2, 100, 3)
    values = values_of(case)
    assert prefill.prefilled(values) == 140
    assert prefill.workspace_rows(values) == 2 * 103 * 64
    assert prefill.gathered_rows(values) == 2 * 3 * 64 + 40 + 2 * 69
    every = but(case, topk_indices=None)
    assert prefill.prefilled(values_of(every)) == 70 + 3 * 64
    none = values_of(but(every, extra_cache=None, extra_block_table=None))
    assert prefill.prefilled(none) == 70
    assert prefill.gathered_rows(none) == 40 + 2 * 69
    assert prefill.gathered_rows(values_of(wide(case, 2, 1, 3))) == 2 * 3 * 64 + 2 * 64


def sizes_of(tokens, heads, topk, blocks):
    """Return the shapes of a prefill of one request, with ``blocks`` blocks of 64 rows."""

    def ints(*shape):
        return torch.empty(shape, dtype=torch.int32, device="meta")

    return {
        "q": torch.empty(tokens, heads, 512, device="meta"),
        "swa_block_table": ints(1, 512),
        "swa_block_size": 64,
        "extra_cache": ints(1) if blocks else None,
        "extra_block_table": ints(1, blocks) if blocks else None,
        "extra_block_size": 64,
        "topk_indices": ints(tokens, topk) if topk else None,
        "window_size": 128,
    }


@pytest.mark.parametrize(
    ("sizes", "copies"),
    [
        ((1, 64, 2048, 80), False),  # few tokens: the keys are split
        ((33, 128, 4096, 80), False),
        ((67, 64, 2048, 80), True),  # not measured
        ((512, 64, 512, 80), True),  # 102 us with a copy, 118 from the blocks (H200, 2026-11-22)
        ((256, 64, 512, 80), False),  # 59, 57
        ((256, 64, 1024, 80), True),  # 85, 91
        ((256, 128, 512, 80), True),  # 100, 115
        ((128, 128, 1024, 80), True),  # 83, 90
        ((128, 128, 512, 80), False),  # 56, 56
        ((64, 128, 1024, 80), False),  # 48, 47
        ((2048, 64, 0, 0), True),  # 133, 179
        ((256, 64, 0, 0), False),  # 25, 23
        ((512, 64, 0, 16), True),  # all rows of a table
        ((256, 128, 0, 16), True),
        ((256, 64, 0, 16), True),  # 88, 97 (H200, 2026-11-23)
        ((133, 64, 0, 16), True),  # not measured: the 133rd program starts when others have ended
        ((128, 64, 0, 16), False),  # 51, 51
        ((64, 64, 0, 128), False),  # 23, but 14 if the request has 17 of 8192 rows
        ((512, 64, 0, 128), True),  # 60, but 55 for 17 rows
        ((512, 64, 512, 2000), False),  # 128000 rows take 64 us
        ((2048, 64, 512, 2000), True),
        ((2**17, 64, 1024, 80), False),  # more lists than 512 MiB
        ((2**14, 64, 512, 2**14), False),  # more rows than 1 GiB
    ],
)
def test_a_prefill_copies_where_that_is_faster(sizes, copies):
    assert prefill.gathers(sizes_of(*sizes)) == copies
