"""Launches of an AOTInductor package for any number of tokens on Hopper, size by size."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.target import HOPPER
from dsv4_ops.kernels.aot import launch_op
from dsv4_ops.kernels.aot.compile import Argument
from dsv4_ops.kernels.common.attention.calls import DecodeCall, PrefillCall
from dsv4_ops.kernels.indexer.topk import indexer_select
from dsv4_ops.kernels.launcher import Launcher
from dsv4_ops.kernels.mla import decode as mla
from dsv4_ops.kernels.sparse_mla import decode, prefill
from dsv4_ops.lowering import gluon
from tests.helpers import i32, nightly
from tests.support.attention_batches import generator, integers


class Prefill(torch.nn.Module):
    """A prefill of any size, which reads blocks or a copy of the rows."""

    def forward(self, *tensors):
        call = PrefillCall(*tensors, 0.1, 128, 4, 64, 64, MainLayout.tag)
        return prefill.launch_by_size(launch_op.PACKAGED, call)


def launches_of(program, sizes):
    """Return the programs of all launches, and the bytes of all allocations, for these sizes."""
    launches, held = [], 0
    for node in program.graph.nodes:
        if node.target is torch.ops.dsv4_ops._launch_hopper.default:
            launches.append((node.args[0], node.args[4]))
        elif "triton_kernel_wrapper" in str(node.target):
            launches.append(("triton", node.kwargs["grid"][0]))
        elif node.target is torch.ops.aten.new_empty.default:
            value = node.meta["val"]
            held += math.prod(at(each, sizes) for each in value.shape) * value.dtype.itemsize
    return [(name, math.prod(at(each, sizes) for each in grid)) for name, grid in launches], held


def at(size, sizes):
    """Return the value of a graph's node, a symbol or a number."""
    value = size.meta["val"] if isinstance(size, torch.fx.Node) else size
    return int(value if isinstance(value, int) else value.node.expr.subs(sizes))


def test_a_prefill_of_any_size_has_both_ways():
    """With 64 heads, 128 + 512 keys and 5120 compressed rows, 256 tokens read the blocks, and 2048
    read a copy, unless the table has more than 2^20 rows. The other variant has no programs, and no
    memory for rows and lists. No symbol becomes a number. For few tokens, the 10 blocks are split
    over 132 programs: 40 tokens have three splits of up to 4 blocks, 66 tokens two."""
    made, heads = generator(0), 64
    cache = MainLayout(64).allocate(9, "cpu")
    tokens, pages = torch.export.Dim("tokens", min=2), torch.export.Dim("pages", min=2)
    given = (
        *(torch.randn(7, heads, 512, generator=made).bfloat16(), cache, torch.arange(7)),
        *(i32([0] * 7), integers(made, 0, 9, 1, 11), cache, integers(made, 0, 9, 1, 80)),
        *(integers(made, 0, 9, 7, 512), torch.zeros(heads)),
    )
    first = {0: tokens}
    dims = (first, None, first, first, {1: pages}, None, None, first, None)
    program = torch.export.export(Prefill(), given, dynamic_shapes=(dims,))
    tensors = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    symbols = [tensors[0].shape[0].node.expr, tensors[4].shape[1].node.expr]
    few, many, far = (
        launches_of(program, dict(zip(symbols, sizes, strict=True)))
        for sizes in ((256, 300), (2048, 300), (2048, 17000))
    )
    names = ["hopper_prefill_keys_kernel", *["triton"] * 5, "hopper_gathered_keys_kernel"]
    for found, programs in ((few, 256), (far, 2048)):  # a head of one token has nothing to combine
        assert found[0] == [*zip(names, (programs, heads, 0, 0, 0, 0, 0), strict=True)]
    # spans of 1 request; 640 and 2400 groups of 8 rows, for up to 2112 programs; lists
    assert many[0] == [*zip(names, (0, 0, 1, 640, 2112, 2048, 132), strict=True)]
    for count, splits in ((2, 10), (13, 10), (14, 5), (40, 3), (66, 2), (67, 1)):
        found, _ = launches_of(program, dict(zip(symbols, (count, 300), strict=True)))
        joins = heads * (count if splits > 1 else 1)
        assert found[:3] == [(names[0], count * splits), ("triton", joins), ("triton", 0)], count
    rows = 300 * 64 + 80 * 64
    assert many[1] - few[1] > rows * 1024 + 2048 * 640 * 4
    parts = 132 * heads * (1024 + 8)
    assert few[1] < 256 * (heads * (1024 + 8) + 8) + parts + 1000


def paged_program(heads, columns, tokens, dims):
    """Export a decode with block tables; ``dims`` are those of tokens and of columns."""
    made = generator(0)
    main, pages = MainLayout(64).allocate(9, "cpu"), MainLayout(2).allocate(9, "cpu")
    given = (
        torch.randn(tokens, heads, 512, generator=made).bfloat16(),
        *(main, integers(made, 0, 9, tokens, 128), i32([0] * tokens)),
        *(pages, integers(made, 0, 9, tokens, columns), i32([0] * tokens), i32([0] * tokens)),
    )
    first, second = dims
    shapes = (first, None, first, first, None, {**first, **second}, first, first)
    return torch.export.export(Paged(), given, dynamic_shapes=(shapes,))


ON_HOPPER = Launcher(launch_op.PACKAGED, aligns_inputs=True, capability=HOPPER)
"""The launcher that traces a package, with tensors on no GPU."""


class Paged(torch.nn.Module):
    """A decode with block tables, for any number of tokens."""

    def forward(self, *tensors):
        *lists, req_indices = tensors
        numbers = (0.1, 64, 2, MainLayout.tag, 0, False)
        call = DecodeCall(*lists, None, None, None, None, *numbers, req_indices)
        return decode.split_and_combine(ON_HOPPER, call)


@pytest.mark.parametrize("heads", [64, 128])
def test_a_decode_of_any_size_is_cut_where_its_programs_are_few(heads):
    """Tokens have 2 window blocks and 3 blocks for 150 rows, and one program per 64 heads. Below 32
    programs, splits add up to 132 programs (30 programs have three splits of two blocks). From 32
    to 120, a schedule uses all SMs; above, it adds a quarter of the SMs to the programs. More than
    256 tokens are not split. About 1024 programs combine."""
    tokens = {0: torch.export.Dim("tokens", min=2)}
    program = paged_program(heads, 75, 7, (tokens, {}))
    (symbol,) = program.range_constraints
    tiles = heads // 64
    beyond = 132 // tiles // 4
    for programs, wanted in (
        (2, 5 * 2), (30, 3 * 30), (32, 132), (64, 132), (120, 132),
        (122, 122 + beyond * tiles), (132, 132 + beyond * tiles), (256, 256 + beyond * tiles),
        (256 * tiles, (256 + beyond) * tiles), (257 * tiles, 257 * tiles), (1000, 1000),
    ):  # fmt: skip
        count = programs // tiles
        found, _ = launches_of(program, {symbol: count})
        joins = min(count, 1024 // heads) * heads
        assert found == [("hopper_split_keys_kernel", wanted), ("triton", joins)], programs
    kept, _ = launches_of(program, {symbol: 122 // tiles})
    assert kept[0][1] == 122 + beyond * tiles


class Selection(torch.nn.Module):
    """A selection for any number of tokens and of blocks per request."""

    def __init__(self, topk):
        super().__init__()
        self.sizes = {"block_size": 64, "compress_ratio": 1, "topk": topk}

    def forward(self, *tensors):
        return indexer_select(ON_HOPPER, *tensors, **self.sizes, layout=IndexerLayout.tag)


@pytest.mark.parametrize(
    ("topk", "launched"),
    [
        # 396 programs are 49, 6, 1 and 0 per token; up to 8 lists are merged at once
        (512, {(8, 3125): (392, 64, 8), (66, 3125): (396, 1, 66), (200, 3125): (200, 1, 1),
               (400, 3125): (396, 1, 1)}),
        (2048, {(2, 100): (2 * 13, 0, 2, 0, 0, 0), (7, 500): (7 * 63, 7 * 15, 7, 0, 0, 0),
                (300, 2287): (300 * 286, 300, 300, 0, 0, 0), (300, 2288): (0, 0, 0, 300, 1, 1),
                (9, 90000): (0, 0, 0, 396, 9 * 2, 9)}),
    ],
)  # fmt: skip
def test_a_selection_of_any_size(topk, launched):
    """Merges that have nothing to do have one program. The scores of 2048 rows and more are stored
    if they take up to 512 MiB: 300 tokens may have up to 2287 blocks. The other variant has no
    programs, and no memory for scores. Rows of up to 8192 keys need no list."""
    queries = torch.zeros(7, 64, 128).to(torch.float8_e4m3fn), torch.zeros(7, 64)
    rows = torch.zeros(7, dtype=torch.int64), i32([0] * 7), i32([[0] * 11] * 3)
    tokens, columns = {0: torch.export.Dim("tokens", min=2)}, torch.export.Dim("columns", min=2)
    dims = (tokens, tokens, None, tokens, tokens, {1: columns})
    given = (*queries, IndexerLayout(64).allocate(9), *rows)
    program = torch.export.export(Selection(topk), given, dynamic_shapes=(dims,))
    symbols = program.range_constraints  # of tokens and blocks
    for (count, blocks), programs in launched.items():
        found, held = launches_of(program, dict(zip(symbols, (count, blocks), strict=True)))
        assert [each for _, each in found] == [*programs], (count, blocks)
        stored = len(programs) > 3 and programs[0] > 0
        scratch = held - 2 * 396 * max(2048, 2 * topk) * 4
        assert 256 * count * blocks * stored < scratch < 2**29 * stored + 4 * 2**20


class Dense(torch.nn.Module):
    """A dense decode, for any number of tokens and of blocks per request."""

    def forward(self, *tensors):
        numbers = {"softmax_scale": 0.1, "block_size": 64, "num_splits": 0, "layout": "plain"}
        settings = {**numbers, "batch_invariant": False, "slots": False}
        return mla._attend_on_hopper(ON_HOPPER, *tensors, None, None, **settings)


def dense_program(heads):
    """Return the exported program, and the symbols of tokens and columns."""
    made = generator(0)
    tensors = (
        torch.randn(7, heads, 576, generator=made).bfloat16(),
        torch.zeros(9, 64, 576).bfloat16(),
        *(i32([0] * 7), i32([0] * 7), integers(made, 0, 9, 3, 11)),
    )
    tokens = {0: torch.export.Dim("tokens", min=2)}
    columns = {1: torch.export.Dim("columns", min=2)}
    shapes = (tokens, None, tokens, tokens, columns)
    program = torch.export.export(Dense(), tensors, dynamic_shapes=(shapes,))
    held = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return program, (held[0].shape[0].node.expr, held[4].shape[1].node.expr)


def test_a_dense_decode_of_any_size():
    """A request has 256 pairs of blocks, and 128 heads are two tiles. 2 tokens have 4 programs: 33
    splits would fill 132, and 32 splits of 8 pairs take as long. From 16 tokens, lengths decide."""
    program, symbols = dense_program(128)
    for count, wanted in ((2, 2 * 2 * 32), (16, 132), (64, 2 * (64 + 16)), (257, 2 * 257)):
        found, _ = launches_of(program, dict(zip(symbols, (count, 512), strict=True)))
        assert found[0] == ("hopper_mla_decode_kernel", wanted), count


def compiled(program):
    """Yield each launch's kernel, compiled for what the graph knows of the arguments."""

    def known(value):
        value = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        if isinstance(value, torch.Tensor):
            return Argument.tensor(value.dtype)
        expression = value if isinstance(value, int) else value.node.expr
        if getattr(expression, "free_symbols", ()):
            return Argument("i32")
        return 1 if int(expression) == 1 else Argument.number(int(expression))

    for node in program.graph.nodes:
        if node.target is torch.ops.dsv4_ops._launch_hopper.default:
            name, *lists, _, text = node.args
            rest = launch_op.Rest.of(text)
            arguments = rest.arguments(*([known(each) for each in values] for values in lists))
            yield gluon.binary_of(launch_op.KERNELS[name], arguments, rest.options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "columns", "tokens", "dynamic"),
    [
        (64, 75, 7, "tokens"),
        *nightly("one of them a symbol", (64, 75, 100, "columns"), (128, 75, 40, "both"),
         (64 * 67, 75, 1, "nothing")),
    ],
)  # fmt: skip
def test_what_is_known_of_a_decode_compiles(heads, columns, tokens, dynamic):
    """Splits, programs and the use of a schedule are each a symbol, a number, or Triton's 1."""
    some = {"tokens": ("tokens",), "columns": ("columns",), "both": ("tokens", "columns")}
    dims = tuple(
        {place: torch.export.Dim(name, min=2)} if name in some.get(dynamic, ()) else {}
        for place, name in enumerate(("tokens", "columns"))
    )
    made = list(compiled(paged_program(heads, columns, tokens, dims)))
    assert [each.function for each in made] == ["hopper_split_keys_kernel"]
