"""Kernels without a GPU: their results in Triton's interpreter, and their cubins for sm_90."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsv4_ops
from dsv4_ops.__main__ import main
from dsv4_ops.core.registry import OPS
from tests.helpers import EVERY, NIGHTLY, SMOKE
from tests.support import forked

pytest.importorskip("triton", reason="published for Linux only")
KERNEL_OPS = {name for name, spec in OPS.items() if spec.has_kernel}


@pytest.mark.slow
def test_kernels_equal_their_references_in_the_interpreter():
    """Bytes and bits are equal, over sampled batches. The interpreter converts e4m3 codes by
    integers, so only a GPU checks the hardware's cast."""
    assert interpreted("12" if NIGHTLY else "1") == KERNEL_OPS - {"sparse_mla_gathered"}


def interpreted(examples, *names):
    """Return the ops whose kernels were right."""
    script = Path(__file__).parent / "interpret_kernels.py"
    return {line.split()[0] for line in forked.interpreted(script, examples, *names)}


# kernels with 14 warps or more per SM, whose registers hold many bytes in flight (with an inverse
# RoPE, Triton 3.7 uses 128 to 167 registers, which is 12 warps)
BYTES_IN_REGISTERS = {
    "combine_listed_kernel", "combine_splits_kernel", "compress_and_insert_kernel",
    "insert_c4_step_kernel", "stream_ends_kernel",
}  # fmt: skip

# kernels with two programs per SM, which hold a tile of products or the keys that they select from
TILES_IN_REGISTERS = {
    "cp_topk_kernel", "down_by_blocks_kernel", "expert_counts_kernel", "expert_plan_kernel",
    "fp8_block_kernel", "gate_up_by_blocks_kernel", "indexer_logits_kernel",
    "indexer_logits_ragged_kernel", "keep_keys_kernel", "pool_windows_kernel",
    "router_products_kernel", "score_keys_kernel", "select_keys_kernel", "select_logits_kernel",
    "stream_products_kernel",
}  # fmt: skip

# kernels with one program per SM: sums, or keys to merge, fill its registers; or the grid has only
# one program
ONE_PER_SM = {
    "down_kernel", "fp8_linear_kernel", "gate_up_kernel", "hopper_gathered_keys_kernel",
    "hopper_mla_decode_kernel", "hopper_prefill_keys_kernel", "hopper_split_keys_kernel",
    "merge_groups_kernel", "merge_parts_kernel", "mla_expand_kernel", "mla_prefill_kernel",
    "mla_decode_kernel", "prefill_keys_kernel", "select_kept_kernel",
    "sparse_mla_plan_kernel", "split_keys_kernel",
}  # fmt: skip


SMALLEST = [
    "gather_indexer_k",
    "insert_k_cache",
    "quantize_and_insert_indexer_k",
    "save_compressor_states",
]
"""Ops whose kernels the interpreter runs in a second or two: part of `make check`."""


@pytest.mark.check
def test_the_smallest_kernels_equal_their_references_in_the_interpreter():
    assert interpreted("1", *SMALLEST) == set(SMALLEST)


PARTS = 2
FEW = ("compress_and_insert", "gather_indexer_k", "indexer_logits", "mla_prefill")


def launched():
    """Return the launches of each example."""
    from dsv4_ops.cli import kernels

    return {
        name: kernels.launches(name.partition(",")[0], args, settings, (9, 0))
        for name, (args, settings) in kernels.examples().items()
    }


def one_of_each_kernel(launches):
    """Return examples that together launch every kernel; each adds a kernel to those before."""
    chosen, seen = {}, set()
    for name, found in launches.items():
        names = {launch.kernel.__name__ for launch in found}
        if not names <= seen or name == "experts, codes":
            chosen[name] = found
            seen |= names
    return chosen


def test_examples_launch_every_kernel():
    from dsv4_ops.cli import kernels

    names = {launch.kernel.__name__ for launches in launched().values() for launch in launches}
    assert names == written_kernels()
    assert {name.partition(",")[0] for name in kernels.examples()} == KERNEL_OPS


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("part", range(PARTS))
def test_no_kernel_spills_registers(part, monkeypatch):
    """With each release of Triton, `make lanes` and `make kernels` compile every variant, and `make
    smoke` one of each kernel. `make test` compiles one for each kind of limit."""
    from dsv4_ops.cli import kernels

    chosen = launched()
    if not EVERY:
        chosen = one_of_each_kernel(chosen)
    if not (SMOKE or EVERY):
        chosen = {name: chosen[name] for name in FEW}
    mine = dict([*chosen.items()][part::PARTS])
    launches = iter(mine.values())
    monkeypatch.setattr(kernels, "examples", lambda: dict.fromkeys(mine, ((), {})))
    monkeypatch.setattr(kernels, "launches", lambda *_: next(launches))
    reports = kernels.report()
    assert [report.kernel for report in reports] == [
        launch.kernel.__name__ for launches in mine.values() for launch in launches
    ]
    assert not kernels.spilling(reports)
    for item in reports:
        if item.op == "experts, codes":
            assert item.registers <= 168, f"three programs of four warps fit an SM: {item}"
        if item.kernel in ONE_PER_SM:
            continue
        limit = 144 if item.kernel in BYTES_IN_REGISTERS else 64
        limit += 24 if "inverse RoPE" in item.op else 0
        if item.kernel in TILES_IN_REGISTERS:
            limit = 65536 // (2 * 32 * item.warps) if item.warps > 4 else 255
        assert item.registers <= limit, f"occupancy falls: {item}"


@pytest.mark.smoke
def test_a_thread_loads_16_bytes_of_a_row_at_once():
    """Triton 3.9 takes results of ``tl.where`` to be unaligned, and then loads single values."""
    from dsv4_ops.cli import kernels

    for name, load in (("indexer_logits", "cp.async.cg"), ("compress_and_insert", "ld.global.v4")):
        (launch,) = kernels.launches(name, *kernels.examples()[name], (9, 0))
        assert kernels.compiled(launch, 90).asm["ptx"].count(load) >= 32, name


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.skipif(not (SMOKE or NIGHTLY), reason="in make smoke, on the Triton of GPUs")
def test_code_tiles_take_four_words_of_a_thread_that_are_side_by_side():
    """The assembly reads four words of one scale at a time, which depends on Triton's layout."""
    from dsv4_ops.cli import kernels
    from dsv4_ops.kernels.aot import compile
    from dsv4_ops.kernels.aot.compile import Argument

    found = {}
    for launch in launched()["experts, codes"]:
        name = launch.kernel.__name__
        if not launch.kwargs.get("CODES") and "by_blocks" not in name:
            continue
        arguments = [kernels._specialised(value) for value in launch.args]
        codes = launch.kernel.arg_names.index("codes")
        arguments[codes] = Argument.tensor(torch.uint8, aligned=False)
        module = compile.compiled(launch.kernel, arguments, launch.kwargs, 90).asm["ttgir"]
        tiles = re.findall(r"packed_element = 4 : i32.*?: tensor<64x16xi32, (#\w+)>", module)
        found[name] = len(tiles)
        for layout in set(tiles):
            held = re.search(rf"^{layout} = (.*)$", module, re.M)
            assert held, f"{layout} of {module[:2000]}"
            blocked = "sizePerThread = [1, 4]" in held[1] and "order = [1, 0]" in held[1]
            assert blocked or "register = [[0, 1], [0, 2]," in held[1], f"{name}: {held[1]}"
    # two per step, for single blocks and for pairs
    products = {"gate_up_kernel": 4, "down_kernel": 4}
    assert found == {**products, "gate_up_by_blocks_kernel": 1, "down_by_blocks_kernel": 1}


def written_kernels():
    written = set()
    for path in Path(dsv4_ops.__file__).parent.glob("kernels/**/*.py"):
        lines = path.read_text().splitlines()
        written |= {line[4:].partition("(")[0] for line in lines if line.endswith("_kernel(")}
    return {name for name in written if name.endswith("_kernel")}


def test_kernels_prints_a_table(capsys, monkeypatch):
    from dsv4_ops.cli import kernels

    made = kernels.KernelReport("op", "some_kernel", 4, 32, 0, 128)
    monkeypatch.setattr(kernels, "report", lambda capability, progress: [made])
    assert main(["kernels"]) == 0
    assert "some_kernel" in capsys.readouterr().out
    spilled = kernels.OTHER_SPILLS  # the allowed bytes on GPUs other than Hopper
    monkeypatch.setattr(kernels, "report", lambda capability, progress: [made, spilling])
    spilling = kernels.KernelReport("op", "other_kernel", 4, 255, spilled, 128)
    assert main(["kernels", "--targets", "80,100"]) == 0
    assert main(["kernels", "--targets", "90"]) == 1
    spilling = replace(spilling, spills=spilled + 4)
    assert main(["kernels", "--targets", "80,100"]) == 1
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line in ("sm_80", "sm_100")]
    assert "sm_100: registers are spilled in other_kernel" in printed.err
    large = kernels.KernelReport("op", "large_kernel", 4, 32, 0, 100 * 1024)
    monkeypatch.setattr(kernels, "report", lambda capability, progress: [large])
    assert main(["kernels", "--targets", "80"]) == 0
    assert main(["kernels", "--targets", "80,86"]) == 1
    assert "sm_86: a program has less memory in large_kernel" in capsys.readouterr().err
