"""Collectives of context parallelism: on two gloo processes, and their errors on fake ranks."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import dsv4_ops as ops
from dsv4_ops.attention import ContextParallel
from dsv4_ops.core.torch_compat import one_graph_for_all_sizes
from dsv4_ops.core.types import MergedStates
from dsv4_ops.ops.context_parallel import GATHERS, gather_each
from tests.helpers import NIGHTLY, i32, nightly
from tests.support.ranks import run_ranks

NAN, INF = math.nan, math.inf
CPU_WAYS = ("reduce_scatter", "all_to_all")


def parts(world: int, num_tokens: int, num_heads: int, dtype: torch.dtype) -> MergedStates:
    """Sample outputs and log-sum-exps of all ranks, some of which have no keys."""
    seed = torch.Generator().manual_seed(num_tokens)
    outs = torch.randn(world, num_tokens, num_heads, 6, generator=seed).to(dtype)
    lses = torch.randn(world, num_tokens, num_heads, generator=seed) * 9
    for token, empty in zip(range(num_tokens - 1), (-INF, INF, NAN), strict=False):
        lses[token % world, token] = empty
        outs[token % world, token] = NAN
    lses[:, -1:, 0] = -INF  # no rank has keys
    outs[:, -1:, 0] = NAN
    return MergedStates(outs, lses)


def own(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return whole.chunk(world, 1)[rank]


def rank_combines(rank: int, world: int) -> None:
    group = dist.group.WORLD.group_name
    tensor = i32([rank])
    for via in CPU_WAYS:
        counter = CompileCounter()
        combine = partial(ops.cp_combine, group=group, cp_rank=tensor, via=via)
        compiled = torch.compile(combine, backend=counter, fullgraph=True, dynamic=True)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for num_tokens in (0, 1, 2, 5, 7) if NIGHTLY else (0, 2, 5):
                for base in ("e", "2"):
                    outs, lses = parts(world, num_tokens, 4 * world, dtype)
                    whole = ops.merge_states(outs.double().float(), lses, lse_base=base)
                    want = [own(each, rank, world) for each in whole]
                    run = compiled if (base, dtype) == ("e", torch.float32) else combine
                    run = combine if num_tokens < 2 else run
                    # clones, because Dynamo guards on the base of a view
                    found = run(outs[rank].clone(), lses[rank].clone(), lse_base=base)
                    # shares and their sums are rounded, and none exceeds amax;
                    # all_to_all rounds once
                    amax = max(outs.nan_to_num().abs().flatten().tolist(), default=0.0)
                    bound = 2 * world * torch.finfo(dtype).eps * amax
                    assert found.out.dtype == dtype, (via, dtype)
                    assert found.out.shape == want[0].shape
                    error = (found.out.float() - want[0]).abs()
                    assert bool((error <= bound).all()), (via, dtype, num_tokens, base)
                    torch.testing.assert_close(found.lse, want[1])
                    if via == "all_to_all":
                        torch.testing.assert_close(found.out, want[0].to(dtype))
        assert counter.frame_count == 1, (via, counter.frame_count)
    no_rank = ops.cp_combine(outs[rank], lses[rank], group, lse_base="2")
    torch.testing.assert_close(no_rank.lse, want[1])


def rank_gathers(rank: int, world: int) -> None:
    group = dist.group.WORLD.group_name
    for num_tokens in (0, 1, 5):
        heads = torch.arange(world * num_tokens * 6.0).view(num_tokens, world * 3, 2)
        for via in GATHERS:  # on a CPU both are an all-gather
            found = ops.cp_gather_heads(own(heads, rank, world), group, via=via)
            assert torch.equal(found, heads)
        for dtype in (torch.uint8, torch.bfloat16, torch.float8_e4m3fn):
            rows = heads.flatten(1).to(dtype) if num_tokens else heads.new_zeros(2, 3).to(dtype)
            part = rows[:4] if rank == 0 else rows[1:]
            if num_tokens == 5:
                found = ops.cp_gather_rows(part, group)
                want = torch.cat([rows[:4], *[rows[1:]] * (world - 1)]).view(torch.uint8)
                assert torch.equal(found.view(torch.uint8), want)


def rank_checks(rank: int, world: int) -> None:
    rank_combines(rank, world)
    rank_gathers(rank, world)


@pytest.mark.nightly("test_context_parallel.py has two ranks in a model")
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *nightly("the same on two ranks", 4)])
def test_ranks_gather_and_combine(world: int, tmp_path) -> None:
    run_ranks(world, rank_checks, tmp_path, world)


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def test_errors(fake_ranks: str) -> None:
    out, lse = torch.zeros(2, 6, 4), torch.zeros(2, 6)
    rows = [
        ((out[:, :4], lse[:, :4], fake_ranks), {}, ValueError, "out must have a multiple of 3"),
        ((out, lse[:1], fake_ranks), {}, ValueError, "lse must have shape"),
        ((out.long(), lse, fake_ranks), {}, TypeError, "out must be torch.bfloat16"),
        ((out, lse, "another"), {}, ValueError, "group must be the name of an initialised"),
        ((out, lse, dist.group.WORLD), {}, TypeError, "group must be the name of a process group"),
        ((out, lse, fake_ranks), {"via": "mail"}, ValueError, "via must be 'reduce_scatter' or"),
        ((out, lse, fake_ranks), {"lse_base": "10"}, ValueError, "lse_base must be"),
        ((out, lse, fake_ranks, i32([1, 2])), {}, ValueError, "cp_rank must have shape"),
        ((out, lse, fake_ranks), {"via": "symmetric_memory"}, RuntimeError,
         "via must be another than 'symmetric_memory' on cpu"),
        ((torch.zeros(1, 3, 4097), lse[:1, :3], fake_ranks), {"via": "symmetric_memory"},
         ValueError,
         "via must be another than 'symmetric_memory' for rows of more than 16384 bytes, got "
         "'symmetric_memory' for 16388"),
    ]  # fmt: skip
    for args, named, kind, message in rows:
        with pytest.raises(kind, match=rf"^cp_combine: {message}"):
            ops.cp_combine(*args, **named)
    with pytest.raises(ValueError, match=r"^cp_gather_heads: x must have shape"):
        ops.cp_gather_heads(lse, fake_ranks)
    with pytest.raises(TypeError, match=r"^cp_gather_rows: rows must be a tensor, got str"):
        ops.cp_gather_rows("rows", fake_ranks)
    with pytest.raises(ValueError, match=r"^cp_gather_rows: group must be the name"):
        ops.cp_gather_rows(out, "another")
    with pytest.raises(ValueError, match=r"^cp_gather_rows: via must be 'all_gather' or 'symm"):
        ops.cp_gather_rows(out, fake_ranks, via="all_to_all")
    with pytest.raises(ValueError, match=r"^cp_gather_heads: via must be 'all_gather' or 'symm"):
        ops.cp_gather_heads(out, fake_ranks, via="mail")


def test_graph_of_one_rank_without_its_tensor(fake_ranks: str) -> None:
    """The rank of the process is a constant of the graph."""
    lse = torch.arange(12.0).view(2, 6)
    combine = torch.compile(ops.cp_combine, backend="eager", fullgraph=True)
    assert combine(torch.zeros(2, 6, 4), lse, fake_ranks).lse.shape == (2, 2)


def calls_in(backend: EagerAndRecordGraphs) -> list[torch.fx.Node]:
    (graph,) = backend.graphs
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def test_graph_calls_one_op_for_symmetric_memory(fake_ranks: str) -> None:
    """The op is for any number of tokens; its shapes are known without a GPU."""
    backend = EagerAndRecordGraphs()
    combine = torch.compile(ops.cp_combine, backend=backend, fullgraph=True, dynamic=True)
    with FakeTensorMode():
        out, lse = (torch.empty(2, 6, *rest, device="cuda") for rest in ((4,), ()))
        found = combine(out.half(), lse, fake_ranks, via="symmetric_memory")
    assert [each.shape for each in found] == [(2, 2, 4), (2, 2)]
    assert [each.dtype for each in found] == [torch.float16, torch.float32]
    called = [each for each in calls_in(backend) if "dsv4_ops" in str(each.target)]
    assert [each.target for each in called] == [torch.ops.dsv4_ops._combine_ranks.default]
    # groups of any size may have this name, so the key of a compiled graph contains the size
    assert called[0].args[2:] == (fake_ranks, 3, "e")


def test_graph_calls_one_op_for_gathers_by_symmetric_memory(fake_ranks: str) -> None:
    """Each gather is one op for any number of tokens, also a gather of two tensors."""
    backend = EagerAndRecordGraphs()
    via = ContextParallel(group=fake_ranks, world_size=3, via="symmetric_memory").gathers_via

    def gather(q, rows, out, lse):
        heads = ops.cp_gather_heads(q, fake_ranks, via=via)
        both = gather_each("cp_gather_rows", (out, lse), fake_ranks, dim=0, via=via)
        return heads, ops.cp_gather_rows(rows, fake_ranks, via=via), *both

    with FakeTensorMode():
        q = torch.empty(5, 2, 4, device="cuda").to(torch.float8_e4m3fn).transpose(0, 1)
        rows, lse = torch.empty(7, device="cuda").int(), torch.empty(5, 2, device="cuda")
        out = torch.empty(5, 2, 4, device="cuda").half()
        compiled = torch.compile(gather, backend=backend, fullgraph=True, dynamic=True)
        found = compiled(q, rows, out, lse)
    assert [each.shape for each in found] == [(2, 15, 4), (21,), (15, 2, 4), (15, 2)]
    assert [each.dtype for each in found] == [q.dtype, rows.dtype, out.dtype, lse.dtype]
    assert all(each.is_contiguous() for each in found)
    called = [each for each in calls_in(backend) if "dsv4_ops" in str(each.target)]
    assert [each.target for each in called] == 3 * [torch.ops.dsv4_ops._gather_ranks.default]
    assert [each.args[1:] for each in called] == [(fake_ranks, 3, dim) for dim in (1, 0, 0)]
    assert not any("c10d" in str(each.target) for each in calls_in(backend))


def test_one_token_compiles_for_any_number(fake_ranks: str) -> None:
    run = torch.compile(lambda x: ops.cp_gather_heads(x, fake_ranks), fullgraph=True, dynamic=True)
    with one_graph_for_all_sizes():
        assert [run(torch.ones(n, 2, 4)).shape for n in (1, 3)] == [(1, 6, 4), (3, 6, 4)]


def test_code_for_another_number_of_ranks_is_refused(fake_ranks: str) -> None:
    out, lse = torch.empty(2, 4, 8), torch.empty(2, 4)
    rule = "group must be of 2 ranks, for which the call was compiled, got 3. "
    with pytest.raises(ValueError, match=f"^cp_combine: {rule}"):
        torch.ops.dsv4_ops._combine_ranks(out, lse, fake_ranks, 2, "e")
    for dim, op in enumerate(("cp_gather_rows", "cp_gather_heads")):
        with pytest.raises(ValueError, match=f"^{op}: {rule}"):
            torch.ops.dsv4_ops._gather_ranks([out], fake_ranks, 2, dim)


def test_one_rank_is_the_plain_graph() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD.group_name
        backend = EagerAndRecordGraphs()

        def step(x, lse):
            gathered = x * 2
            for via in GATHERS:
                gathered = ops.cp_gather_heads(gathered, group, via=via)
                gathered = ops.cp_gather_rows(gathered, group, via=via)
            return [ops.cp_combine(gathered, lse, group, via=via) for via in CPU_WAYS]

        x, lse = torch.zeros(2, 3, 4), torch.full((2, 3), NAN)
        first, second = torch.compile(step, backend=backend, fullgraph=True)(x, lse)
        (graph,) = backend.graphs
        assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_function", "output"]
        assert first.out is second.out
        assert second.lse is lse
    finally:
        dist.destroy_process_group()
