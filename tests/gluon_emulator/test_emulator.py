"""The emulator of Gluon kernels finds races, deadlocks and accesses out of bounds."""

import numpy as np
import pytest
import torch

gluon = pytest.importorskip("triton.experimental.gluon", reason="published for Linux only")
hopper = pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
emulated = pytest.importorskip("tests.gluon_emulator.emulate")
gl, mbarrier, fence_async_shared = gluon.language, hopper.mbarrier, hopper.fence_async_shared
async_copy = pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere").async_copy
warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
EmulationError, triton_compat = emulated.EmulationError, emulated.triton_compat
async_load = triton_compat.async_load

SEEDS = range(5)
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def _copy_kernel(source, target, count, MASKED: gl.constexpr):
    place = gl.program_id(0) * 64 + gl.arange(0, 64, LINE)
    there = place < (count if MASKED else 1000)
    gl.store(target + place, gl.load(source + place, mask=there, other=7), mask=there)


@pytest.mark.parametrize("shape", [(100,), (3, 100)], ids=["dense", "a column"])
def test_masked_accesses_end_where_a_tensor_does(shape):
    source = torch.arange(300, dtype=torch.int32)[: int(np.prod(shape))].view(shape)
    source = source if source.dim() == 1 else source[1]
    whole = torch.full((102,), -1, dtype=torch.int32)
    emulated.Emulator()(_copy_kernel)[(2,)](source, whole[1:101], 100, MASKED=True)
    assert whole.tolist() == [-1, *source.tolist(), -1]
    with pytest.raises(EmulationError, match="out of bounds: byte 400 of 400 in source"):
        emulated.Emulator()(_copy_kernel)[(2,)](source, whole[1:101], 100, MASKED=False)
    with pytest.raises(EmulationError, match="out of bounds: byte 396 of 396 in target"):
        emulated.Emulator()(_copy_kernel)[(2,)](source, whole[1:100], 100, MASKED=True)


@gluon.jit
def _numbers_kernel(out, large, negative, DIVISOR: gl.constexpr):
    small = 1
    gl.store(out, small + large)
    gl.store(out + 1, negative // DIVISOR)
    gl.store(out + 2, negative % DIVISOR)
    gl.store(out + 3, negative >> 1)
    gl.store(out + 4, (negative.to(gl.uint32) // DIVISOR).to(gl.int64))
    gl.store(out + 5, gl.to_tensor(1.00390625).to(gl.bfloat16).to(gl.int16, bitcast=True))
    gl.store(out + 6, gl.to_tensor(1.01171875).to(gl.bfloat16).to(gl.int16, bitcast=True))


def test_numbers_wrap_divide_and_round_as_on_the_gpu():
    out = torch.zeros(7, dtype=torch.int64)
    emulated.Emulator()(_numbers_kernel)[(1,)](out, 2**31 - 1, -7, DIVISOR=2)
    assert out[:5].tolist() == [-(2**31), -3, -1, -4, (2**32 - 7) // 2]
    assert out[5:].tolist() == [0x3F80, 0x3F82], "to even"


@gluon.jit
def _produce(source, rows, full, empty, blocks, FENCED: gl.constexpr, FREED: gl.constexpr):
    block = blocks * 0
    while block < blocks:
        if FREED:
            mbarrier.wait(empty, (block & 1) ^ 1)
        dim = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
        row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
        values = gl.load(source + block * 4096 + row[:, None] * 64 + dim[None, :])
        rows.store(values)
        if FENCED:
            fence_async_shared()
        mbarrier.arrive(full)
        block += 1


@gluon.jit
def _consume(out, rows, full, empty, blocks, WAITS: gl.constexpr, EARLY: gl.constexpr):
    sums = gl.full([64, 64], 0.0, gl.float32, SUMS)
    block = blocks * 0
    while block < blocks:
        if WAITS:
            mbarrier.wait(full, block & 1)
        product = warpgroup_mma(rows, rows.permute((1, 0)), sums, is_async=True)
        if EARLY:
            mbarrier.arrive(empty)
        sums = warpgroup_mma_wait(0, deps=(product,))
        if not EARLY:
            mbarrier.arrive(empty)
        block += 1
    row = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    gl.store(out + row[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, SUMS))[None, :], sums)


@gluon.jit
def _squares_kernel(
    source,
    out,
    blocks,
    FENCED: gl.constexpr,
    FREED: gl.constexpr,
    WAITS: gl.constexpr,
    EARLY: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Sum blocks times their transposes: one partition loads, another multiplies."""
    rows = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.NVMMASharedLayout(128, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=COUNT)
    gl.warp_specialize(
        [
            (_consume, (out, rows, full, empty, blocks, WAITS, EARLY)),
            (_produce, (source, rows, full, empty, blocks, FENCED, FREED)),
        ],
        [4],
        [64],
    )


def squares(seed, blocks=4, **changed):
    source = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.zeros(64, 64)
    rules = {"FENCED": True, "FREED": True, "WAITS": True, "EARLY": False, "COUNT": 1}
    emulated.Emulator(seed)(_squares_kernel)[(1,)](source, out, blocks, **(rules | changed))
    torch.testing.assert_close(out, (source.float() @ source.float().mT).sum(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_partitions_hand_over_a_buffer(seed):
    squares(seed)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"COUNT": 2}, "deadlock: partition 0 waits for phase 1 .* 1 waits for phase 0"),
        ({"WAITS": False}, "race: (product|write)|deadlock"),
        ({"FREED": False}, "race: (product|write)|deadlock|partition 0 may miss a phase"),
        ({"EARLY": True}, "race: write by partition 1 and product by 0"),
        ({"FENCED": False}, "no fence: product by partition 0 and write by 1"),
        ({"blocks": 5}, "out of bounds: byte 32768 of 32768 in source"),
    ],
    ids=["deadlock", "no wait", "no room", "freed early", "no fence", "out of bounds"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_may_go_wrong_is_found_in_every_schedule(changed, found, seed):
    with pytest.raises(EmulationError, match=found):
        squares(seed, **changed)


@triton_compat.aggregate
class _Line:
    start: triton_compat.Scalar
    step: triton_compat.Scalar
    length: gl.constexpr


@gluon.jit
def _sum_of(line):
    place = gl.arange(0, line.length, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.sum(gl.load(line.start + place * line.step), 0)


@gluon.jit
def _lines_kernel(out, source, step, LENGTH: gl.constexpr):
    gl.store(out, _sum_of(_Line(source, step, LENGTH)))
    gl.store(out + 1, _sum_of(_Line(length=LENGTH // 2, step=1, start=source)))


def test_an_aggregate_has_fields_in_order_and_by_name():
    source, out = torch.arange(256).int(), torch.zeros(2).int()
    emulated.Emulator()(_lines_kernel)[(1,)](out, source, 2, LENGTH=128)
    assert out.tolist() == [2 * sum(range(128)), sum(range(64))]


@gluon.jit
def _count(bar, phases):
    phase = phases * 0
    while phase < phases:
        mbarrier.wait(bar, phase & 1)
        phase += 1


@gluon.jit
def _run_ahead(bar, phases):
    phase = phases * 0
    while phase < phases:
        mbarrier.arrive(bar)
        phase += 1


@gluon.jit
def _phases_kernel(out, phases):
    """Let a partition wait for phases that the other partition completes without waiting."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(_count, (bar, phases)), (_run_ahead, (bar, phases))], [4], [64])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_that_may_be_missed_is_found_in_every_schedule(seed):
    """As a barrier has one bit, it looks the same after two more phases."""
    out = torch.zeros(1)
    emulated.Emulator(seed)(_phases_kernel)[(1,)](out, 1)
    with pytest.raises(EmulationError, match=r"partition 0 may miss a phase|deadlock"):
        emulated.Emulator(seed)(_phases_kernel)[(1,)](out, 2)


@gluon.jit
def _groups_kernel(source, out, BEHIND: gl.constexpr, COMMITS: gl.constexpr):
    """Start two groups of copies; read the first when all but BEHIND groups have arrived."""
    rows = gl.allocate_shared_memory(gl.int32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lane = gl.arange(0, 64, LINE)
    async_load(rows.index(0), source + lane, mask=lane < 60)
    async_copy.commit_group()
    async_load(rows.index(1), source + 64 + lane)
    if COMMITS:
        async_copy.commit_group()
    async_copy.wait_group(BEHIND)
    gl.store(out + lane, rows.index(0).load(LINE))
    async_copy.wait_group(0)
    gl.store(out + 64 + lane, rows.index(1).load(LINE))


def test_groups_of_copies_arrive_when_they_are_waited_for():
    source, out = torch.arange(1, 129, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    emulated.Emulator()(_groups_kernel)[(1,)](source, out, BEHIND=1, COMMITS=True)
    assert out.tolist() == [*range(1, 61), 0, 0, 0, 0, *range(65, 129)], "no mask: zeros"
    for behind in (2, 3):
        with pytest.raises(EmulationError, match="race: read by partition 0 and write by 0"):
            emulated.Emulator()(_groups_kernel)[(1,)](source, out, BEHIND=behind, COMMITS=True)
    with pytest.raises(EmulationError, match="race: read by partition 0 and write by 0"):
        emulated.Emulator()(_groups_kernel)[(1,)](source, out, BEHIND=0, COMMITS=False)
