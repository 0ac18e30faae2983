"""``testing.released_model`` builds, without files, what ``load_quantized`` would load."""

import os

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

pytest.importorskip("transformers", "5.17", reason="needs deepseek_v4")

from dsv4_ops.attention import ContextParallel
from dsv4_ops.dispatch.kernel_requests import kernel_requests
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.architectures.deepseek_v4 import forwards
from dsv4_ops.integrations.transformers.compile_cache import precompiled
from dsv4_ops.integrations.transformers.modules import fused_projections, split
from dsv4_ops.integrations.transformers.modules.replacement import with_methods
from dsv4_ops.integrations.transformers.steps.dry_runs import DryRuns
from dsv4_ops.integrations.transformers.steps.eager import EagerStep
from dsv4_ops.testing.checkpoint import TINY, write_checkpoint
from dsv4_ops.testing.mla_checkpoint import MODELS, write_mla_checkpoint
from dsv4_ops.testing.released_model import released_model, split_over
from tests.helpers import NIGHTLY
from tests.support.ranks import run_ranks

SPLIT = {**TINY, "num_hidden_layers": 2, "num_hash_layers": 1, "compress_ratios": [4, 128, 0]}
SPLIT |= {"moe_intermediate_size": 256}
"""Shared experts have whole blocks on each of two ranks."""
PLANS = ({}, {"experts": "parts"}, {"heads": False}) if NIGHTLY else ({},)
CLOSE = 0.015
"""Upper limit of the logits' error relative to their norm (median over tokens): both models are in
bfloat16, where near ties of routers may fall differently."""


def kinds(model):
    return {name: (t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("family", ["v4", *MODELS])
def test_tensors_are_those_of_a_loaded_checkpoint(family, tmp_path):
    is_v4 = family == "v4"
    path = write_checkpoint(tmp_path) if is_v4 else write_mla_checkpoint(tmp_path, family)
    loaded = v4.load_quantized(path)
    made = released_model(TINY if is_v4 else loaded.config.to_dict(), device="cpu")
    assert kinds(made) == kinds(loaded)
    modules = [type(module) for module in loaded.modules()]
    assert [type(module) for module in made.modules()] == modules
    assert not any(buffer.is_meta for buffer in made.buffers())
    computed = {name: t for name, t in loaded.named_buffers() if name not in loaded.state_dict()}
    for name, buffer in computed.items():
        assert torch.equal(made.get_buffer(name), buffer), name
    logits = v4.patch(made)(torch.arange(3, 11)[None]).logits
    assert 0.1 < float(logits.std()) < 10


def test_seeds_decide_every_tensor():
    made, again, other = (released_model(TINY, device="cpu", seed=seed) for seed in (3, 3, 4))
    for name, tensor in made.state_dict().items():
        if tensor.element_size() == 1:  # there is no NaN, but equal() supports few dtypes
            tensor = tensor.view(torch.uint8)
        same = again.state_dict()[name].view(tensor.dtype)
        assert torch.equal(tensor, same), name
    weight = "model.layers.0.self_attn.q_a_proj.weight"
    changed = other.state_dict()[weight].view(torch.uint8)
    assert not torch.equal(made.state_dict()[weight].view(torch.uint8), changed)


def called(model):
    """Return the logits of a call in Hugging Face's form."""
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
    return model(torch.arange(10).view(2, 5), cache=cache).logits.flatten(0, 1)


def logits(model):
    """Return logits of Hugging Face's call, of a prefill past a window, and of later steps."""
    found = [called(model)]
    cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
    row = cache.add("a", num_tokens=140)
    for count, length in ((130, 130), (1, 131), (2, 133)):
        tokens = torch.arange(length - count, length) % 500
        ints = [torch.tensor(values, dtype=torch.int32) for values in ([0, count], [length], [row])]
        step = v4.prefill_step if count > 2 else v4.decode_step
        found.append(step(model, v4.StepBatch(tokens, *ints), cache))
    return torch.cat(found)


def run_dry(model, cache):
    """Dry runs request kernels or check the step, call no other rank, and change no module."""
    before = [each.data_ptr() for each in model.buffers()]
    dry_run, copied = DryRuns(v4.decode_step), with_methods(model)
    dry_run._run(copied, cache.tensors, 2, 2, {}, kernel_requests(object()))
    assert dry_run.passes(copied, cache.tensors, 2, 2, {})
    assert [each.data_ptr() for each in model.buffers()] == before


def as_bytes(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.contiguous().view(torch.uint8)


@torch.no_grad()
def rank_parts(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    whole = released_model(SPLIT, device="cpu")
    state, want = whole.state_dict(), torch.load(folder / "want.pt")
    for module in (forwards, fused_projections):  # only in this process, which ends with the test
        module.FUSED_ON = ("cpu",)
    for settings in PLANS:
        model = released_model(SPLIT, device="cpu", distributed=split_over(2, **settings))
        parts = model.state_dict()
        shared = [name for name, each in parts.items() if hasattr(each, "to_local")]
        for name in shared:
            (place,), tensor = parts[name].placements, state[name].view(torch.uint8)
            tensor = state[name] if tensor.shape != state[name].shape else tensor
            if not place.is_shard():  # gate and up of each expert
                pieces = torch.cat([half.chunk(2, 1)[rank] for half in tensor.chunk(2, 1)], 1)
            else:
                pieces = tensor.chunk(2, place.dim)[rank]
            assert torch.equal(as_bytes(parts[name]), as_bytes(pieces)), name
        heads = settings.get("heads", True)
        ranks = ContextParallel.of() if heads else None
        first = called(v4.patch(model, parallel=ranks))
        errors = (logits(model) - want).norm(dim=-1) / want.norm(dim=-1)
        assert errors.median() < CLOSE, (settings, errors)
        assert errors.max() < 10 * CLOSE, (settings, errors)
        assert model.model.layers[0].mlp.shared_experts.dsv4_ops_fused.weight.shape == (256, 256)
        eager = EagerStep(model, v4.prefill_step)
        assert eager.can_be_captured()
        assert all(eager._addresses()), "a distributed tensor itself has the address 0"
        with torch.inference_mode():
            assert torch.equal(called(v4.patch(v4.unpatch(model), parallel=ranks)), first)
        cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64)
        if rank == 0:
            run_dry(model, cache)
        shared = model.model.layers[0].mlp.shared_experts
        rows, compiled = torch.randn(3, 256).bfloat16(), torch.compile(shared, backend="eager")
        assert torch.equal(compiled(rows), shared(rows))  # no read of a part of a fused weight
        forward = v4.unpatch(model).lm_head.forward
        assert forward.__qualname__.endswith("tp_forward"), "that of Hugging Face's plan"
    gate = model.model.layers[0].mlp.gate
    gate.forward = gate.forward  # as ep_router sets it
    with pytest.raises(NotImplementedError, match=r"^patch: .*0\.mlp\.gate must number the"):
        v4.patch(model, parallel=ContextParallel.of() if heads else None)
    loaded = v4.load_quantized(folder / "files", distributed_config=split_over(2))
    model = released_model(SPLIT, device="cpu", distributed=split_over(2))
    assert placed(model) == placed(loaded)
    found, whole = (
        called(v4.patch(loaded, parallel=ContextParallel.of())),
        torch.load(folder / "loaded.pt"),
    )
    assert ((found - whole).norm(dim=-1) / whole.norm(dim=-1)).median() < CLOSE
    rows, group = torch.full((3, 4), 1.0 + rank).bfloat16(), dist.group.WORLD.group_name
    for via in ("symmetric_memory", "all_gather"):
        total = split._sum(rows, split.Split(group, 2, via, sums=True))
        assert torch.equal(total, torch.full((3, 4), 3.0).bfloat16()), via


def placed(model):
    return {
        name: (each.dtype, tuple(as_bytes(each).shape), each.placements)
        for name, each in model.state_dict().items()
        if hasattr(each, "placements")
    }


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_ranks_have_their_parts_of_the_whole(tmp_path):
    """Parts are slices, as a load places them, and logits are those of one process."""
    pytest.importorskip("accelerate", reason="transformers loads split models with it")
    write_checkpoint(tmp_path / "files", SPLIT)
    with torch.no_grad():
        want = logits(v4.patch(released_model(SPLIT, device="cpu")))
        loaded = called(v4.patch(v4.load_quantized(tmp_path / "files")))
    torch.save(want, tmp_path / "want.pt"), torch.save(loaded, tmp_path / "loaded.pt")
    run_ranks(2, rank_parts, tmp_path, tmp_path, seconds=120)


@torch.no_grad()
def rank_decodes(rank, folder):
    """Return the number of graphs that a compiled step of this process traces."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(ranks, DSV4_OPS_CACHE=str(folder / "parts"))
    precompiled.environment = lambda settings: "here"  # graphs run without Inductor
    model = released_model(SPLIT, device="cpu", distributed=split_over(2))
    v4.patch(model, parallel=ContextParallel.of(interleave=2))
    step = v4.compile_step(model, mode="regional", dynamic=True, backend="eager")
    caches = [v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=64) for _ in range(2)]
    assert [each.add(name, num_tokens=8) for each in caches for name in "ab"] == [0, 1, 0, 1]
    for starts, lens in (([0, 3, 4], [3, 1]), ([0, 1, 2], [4, 2]), ([0, 1], [5])):
        ints = (torch.tensor(v, dtype=torch.int32) for v in (starts, lens, range(len(lens))))
        batch = v4.StepBatch(torch.arange(starts[-1]), *ints)
        assert torch.equal(step(batch, caches[0]), v4.decode_step(model, batch, caches[1]))
    return counters["stats"]["unique_graphs"], len(step.parts)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_the_next_ranks_trace_nothing(tmp_path):
    """Each rank keeps parts of its own for the next process of the same rank."""
    pytest.importorskip("accelerate", reason="transformers splits models with it")
    for turn, graphs in enumerate((5, 0)):
        (folder := tmp_path / str(turn)).mkdir()
        found = run_ranks(2, rank_decodes, folder, tmp_path, seconds=120)
        assert found == [(graphs, 5)] * 2
        assert len([each for each in (tmp_path / "parts").rglob("*") if each.is_file()]) == 2 * 5
