"""Launches of the Gluon kernels, and how graphs contain them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import hopper_calls, opaque_calls

pytest.importorskip("triton")

from dsv4_ops.kernels.common.hopper import support
from tests.support import forked
from tests.support.launches import Launches

SETTINGS = {"softmax_scale": 0.1, "swa_block_size": 64, "extra_block_size": 64}
DECODE = {**SETTINGS, "num_splits": 0, "batch_invariant": False}


def arguments(tokens, width=512, heads=64, layout="v4_fp8", device="meta"):
    def made(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device=device)

    cache = MainLayout(64).allocate(8, device)
    if layout == "plain":
        cache = made(8, 64, 512, dtype=torch.bfloat16)
    window = (cache, made(tokens, 128), made(tokens))
    extra = (cache, made(tokens, width), made(tokens)) if width else (None, None, None)
    q = made(tokens, heads, 512, dtype=torch.bfloat16)
    return (q, *window, *extra, None, None, None, None), {**DECODE, "layout": layout}


def launched(tokens, capability=(9, 0), **changed):
    launch = Launches(capability)
    args, settings = arguments(tokens, **changed)
    OPS["sparse_mla_decode"].launcher("triton")(launch, *args, **settings)
    return [(name.removesuffix("_kernel"), grid) for name, grid in launch.made]


def test_hopper_has_kernels_of_its_own():
    assert launched(128) == [("hopper_split_keys", (128, 1))]  # one split each: nothing to combine
    assert launched(8) == [("hopper_split_keys", (80, 1)), ("combine_splits", (8, 64, 1))]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_those_in_triton(capability):
    """Other GPUs run the Triton kernels, with fewer heads per program except on an A100: an Ada has
    less shared memory, and a B200 less tensor memory."""
    tiles = {(8, 0): 1, (10, 0): 2}.get(capability, 4)
    assert launched(128, capability) == [("split_keys", (128, tiles))]


def test_plain_caches_have_those_in_triton():
    assert launched(128, layout="plain") == [("split_keys", (128, 1))]


def test_splits_are_of_whole_blocks_on_hopper():
    """10 blocks for 132 programs become 10 splits. A Triton kernel gets 20 splits of half a block,
    which take less time for 64 heads."""
    assert launched(1) == [("hopper_split_keys", (10, 1)), ("combine_splits", (1, 64, 1))]
    combined = ("combine_splits", (1, 64, 1))
    assert launched(1, layout="plain") == [("split_keys", (20, 1)), combined]
    assert launched(1, (8, 0)) == [("split_keys", (20, 1)), combined]
    assert launched(1, (8, 6)) == [("split_keys", (10, 4)), combined]
    assert launched(16) == [("hopper_split_keys", (80, 1)), ("combine_splits", (16, 64, 1))]


def test_a_split_that_saves_no_more_than_one_block_is_no_split():
    """A combine takes the time of a block. Two window blocks are never split. With 40 tokens, three
    blocks in three splits save two blocks, but in two splits only one. Halves of the two window
    blocks save one and a half."""
    for tokens in (1, 8, 32, 64):
        assert launched(tokens, width=0) == [("hopper_split_keys", (tokens, 1))]
    want = [("hopper_split_keys", (120, 1)), ("combine_splits", (40, 64, 1))]
    assert launched(40, width=64) == want
    assert launched(60, width=64) == [("hopper_split_keys", (60, 1))]
    assert launched(8, (8, 0), width=0) == [("split_keys", (32, 1)), ("combine_splits", (8, 64, 1))]
    assert launched(64, (8, 0), width=0) == [("split_keys", (64, 1))]


def test_programs_that_join_by_a_plan():
    """A head has one program per token (all heads up to 2048), or one per 32 rows that the plan has
    beyond a row per token, whichever number is larger."""

    def joins(tokens, heads, programs):
        args, settings = arguments(tokens, heads=heads)
        plan = torch.empty(tokens + programs, 4, dtype=torch.int32, device="meta")
        launch = Launches((9, 0))
        OPS["sparse_mla_decode"].launcher("triton")(launch, *args[:8], plan, *args[9:], **settings)
        return launch.made[1]

    for tokens, heads, programs, joining in (
        (8, 64, 132, 8), (1, 64, 132, 5), (31, 64, 132, 31), (1000, 64, 132, 32), (64, 128, 66, 16),
        (64, 100, 66, 20), (1, 1, 1, 1), (9, 8, 5000, 157), (3000, 1, 132, 2048),
    ):  # fmt: skip
        assert joins(tokens, heads, programs) == ("combine_splits_kernel", (joining, heads, 1))


@pytest.mark.parametrize(
    ("tokens", "splits", "step"), [(66, 2, 2), (33, 4, 4), (16, 5, 8), (8, 10, 16), (4, 10, 16)]
)
def test_splits_that_are_joined_at_a_time(tokens, splits, step):
    """If sizes are known, all splits are, rounded up to a power of two; with a plan, 4 or 8 are."""
    launch = Launches((9, 0))
    args, settings = arguments(tokens)
    OPS["sparse_mla_decode"].launcher("triton")(launch, *args, **settings)
    assert launch.made[0][1] == (tokens * splits, 1)
    assert launch.constants["combine_splits_kernel"]["STEPS"] == (step, step)
    plan = torch.empty(tokens + 132, 4, dtype=torch.int32, device="meta")
    OPS["sparse_mla_decode"].launcher("triton")(launch, *args[:8], plan, *args[9:], **settings)
    assert launch.constants["combine_splits_kernel"]["STEPS"] == (4, 8)


def paged_launch(tokens, capability=(9, 0), heads=64, columns=256, planned=False, **changed):
    """Return the launches of a call with block tables; blocks have 2 rows."""
    args, settings = arguments(tokens, heads=heads)
    table = torch.empty(tokens, columns, dtype=torch.int32, device="meta")
    plan = torch.empty(tokens + 132, 4, dtype=torch.int32, device="meta") if planned else None
    settings |= {"extra_block_size": 2, **changed}
    lens = args[6]
    launch = Launches(capability)
    OPS["sparse_mla_decode_paged"].launcher("triton")(
        launch, *args[:4], args[4], lens, lens, table, None, plan, None, None, **settings
    )
    return launch


def paged(*args, **changed):
    launch = paged_launch(*args, **changed)
    return [(name.removesuffix("_kernel"), grid) for name, grid in launch.made]


@pytest.mark.parametrize(
    ("tokens", "heads", "programs", "joining"),
    [
        (32, 64, (132, 1), 16), (120, 64, (132, 1), 16), (60, 8, (132, 1), 60),
        (16, 128, (66, 2), 8), (60, 128, (66, 2), 8), (40, 160, (44, 3), 6),
        (121, 64, (154, 1), 16), (256, 64, (289, 1), 16), (61, 128, (77, 2), 8),
        (256, 128, (272, 2), 8), (41, 160, (52, 3), 6),
    ],
)  # fmt: skip
def test_batches_with_tables_are_cut_by_their_lens(tokens, heads, programs, joining):
    """However wide the tables are, there is one program per SM. More tokens than SMs get a program
    each, and a quarter of the SMs for extra splits. About 1024 programs combine."""
    cut = [("hopper_split_keys", programs), ("combine_listed", (joining, heads))]
    assert paged(tokens, heads=heads) == cut
    assert paged(tokens, heads=heads, columns=4096) == cut


@pytest.mark.parametrize(
    ("tokens", "lanes"), [(32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, 256)]
)
def test_lanes_that_cut_are_no_more_than_tokens_need(tokens, lanes):
    constants = paged_launch(tokens).constants
    assert constants["hopper_split_keys_kernel"]["LANES"] == lanes
    assert constants["combine_listed_kernel"]["STEPS"] == (4, 8)


def test_what_is_not_cut():
    """There is no schedule for too few or too many tokens, tables of one block, plans, given splits
    or ``batch_invariant``, or on other GPUs."""
    cut = {"combine_listed"}
    for tokens, changed in (
        (31, {}), (15, {"heads": 128}), (257, {}), (257, {"heads": 128}), (64, {"columns": 32}),
        (64, {"planned": True}), (64, {"num_splits": 2}), (64, {"batch_invariant": True}),
        (64, {"capability": (10, 0)}), (64, {"capability": (8, 0)}),
    ):  # fmt: skip
        assert not cut & {name for name, _ in paged(tokens, **changed)}, (tokens, changed)
    assert paged(64, columns=33)[1][0] == "combine_listed"


def test_kernels_in_gluon_run_on_hopper_alone():
    q = torch.empty(1, 1, 512, dtype=torch.bfloat16)
    assert support.runs(Launches((9, 0)), q, True)
    assert not support.runs(Launches((9, 0)), q, False)
    assert not support.runs(Launches(None), q, True)


@pytest.mark.parametrize(("tokens", "joins"), [(8, 8), (66, 66), (67, 1), (200, 1)])
def test_joins_of_any_number_of_tokens(tokens, joins):
    """A graph for any number of tokens launches the combine for all tokens, or for one token if a
    token has only one split."""
    shapes = ShapeEnv()
    args, settings = arguments(tokens, device="cpu")  # on meta, no size would be a symbol
    with FakeTensorMode(shape_env=shapes) as mode:
        fakes = [one if one is None else mode.from_tensor(one, static_shapes=False) for one in args]
        launch = Launches((9, 0))
        OPS["sparse_mla_decode"].launcher("triton")(launch, *fakes, **settings)
    (name, (programs, _)), (join, (grid, heads, _)) = launch.made
    assert (name, join) == ("hopper_split_keys_kernel", "combine_splits_kernel")
    constants = launch.constants[join]
    assert constants["STEPS"] == (8, 8)
    assert isinstance(grid, torch.SymInt)
    assert int(grid) == joins
    assert int(heads) == 64
    assert int(programs) >= tokens


def test_launches_are_no_opaque_calls():
    launch = "buf1 = torch.ops.dsv4_ops._hopper_split_keys.default(arg0)"
    check = "assert_size_stride(buf2, (1,), (1,), 'torch.ops.dsv4_ops._hopper_split_keys.default')"
    assert opaque_calls(f"{launch}\n    {check}\n") == []
    assert hopper_calls(f"{launch}\n    {check}\n{launch}\n") == {"_hopper_split_keys": 2}
    call = "buf1 = torch.ops.dsv4_ops.sparse_mla_decode.default(arg0)"
    assert opaque_calls(f"    {call}\n# {call}\n") == [call]


def test_every_op_names_the_call_of_its_gluon_kernel():
    declared = {spec.hopper_call for spec in OPS.values()} - {""}
    for spec in OPS.values():
        if spec.hopper_call:
            spec.launcher("triton")
    assert {name for name in dir(torch.ops.dsv4_ops) if name.startswith("_hopper_")} == declared


CACHED = """
import torch, dsv4_ops
from torch._subclasses.fake_tensor import FakeTensorMode
assert not hasattr(torch.ops.dsv4_ops, "_hopper_prefill_keys")
with FakeTensorMode():
    i32 = dict(dtype=torch.int32, device="cuda")
    cache = torch.empty(4, 64 * 584, dtype=torch.uint8, device="cuda")
    table = torch.empty(1, 4, **i32)
    q = torch.empty(2, 8, 512, dtype=torch.bfloat16, device="cuda")
    positions = torch.empty(2, dtype=torch.int64, device="cuda")
    torch.ops.dsv4_ops.sparse_mla_prefill(
        q, cache, positions, torch.empty(2, **i32), table, None, None, None, None,
        softmax_scale=1.0, window_size=128, compress_ratio=1, swa_block_size=64,
        extra_block_size=64, layout="v4_fp8",
    )
print(torch.ops.dsv4_ops._hopper_prefill_keys.default)
"""


def test_code_from_a_cache_finds_its_op():
    """After the fakes have run, the op that code from another process calls exists."""
    run = forked.python("-c", CACHED, seconds=120)
    assert run.returncode == 0, run.stderr
    assert "_hopper_prefill_keys" in run.stdout
