"""Steps run with fake tensors first, which checks them and requests kernels of a simulated GPU."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

from dsv4_ops.core.checks import Checks, checks_are_done
from dsv4_ops.core.torch_compat import FakeTensorMode
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.steps import dry_runs
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.kernels import precompile
from dsv4_ops.lowering import workers as inductor
from dsv4_ops.testing.models import small_mla_model, small_model
from tests.support.hopper import Workers, hopper, on_cuda  # noqa: F401  # a fixture

DECODE = {"state_rings": False}


def cache_of(model, rows, length):
    return v4.PagedCache.for_model(model, max_batch_size=rows, max_cache_len=length).tensors


@pytest.fixture
def step(hopper, monkeypatch):  # noqa: F811
    """Return a model and a cache with fake weights on the GPU, the workers, and a longer cache."""
    mode, workers = FakeTensorMode(allow_non_fake_inputs=True), Workers()
    monkeypatch.setattr(dry_runs, "FakeTensorMode", lambda **settings: mode)
    monkeypatch.setattr(inductor, "compile_workers", lambda: workers.submit)
    model = v4.patch(small_model(dtype=torch.bfloat16))
    caches = cache_of(model, 4, 512), cache_of(model, 16, 768)
    with mode:
        cache, longer = pytree.tree_map(on_cuda, caches)
        for module in model.modules():
            for name, weight in module.named_parameters(recurse=False):
                module._parameters[name] = torch.nn.Parameter(on_cuda(weight), requires_grad=False)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = on_cuda(buffer)
    return model, cache, workers, longer


@pytest.fixture(autouse=True)
def _nothing_fails(monkeypatch):
    monkeypatch.setattr(dry_runs._log, "info", lambda text, error: pytest.fail(text % error))


def test_other_sizes_ask_for_others_alone(step):
    """Small batches share all kernels but the fused insert, and caches of any length share all.
    Triton compiles others only if a count is 1, or a multiple of 16."""
    model, cache, workers, longer = step
    decodes, prefills = dry_runs.DryRuns(decode_step), dry_runs.DryRuns(prefill_step)
    others = dry_runs.DryRuns(decode_step)
    counts = []
    for requests, tensors, sizes, rest in (
        (decodes, cache, (1, 1), DECODE),
        (decodes, cache, (1, 1), DECODE),
        (decodes, cache, (4, 4), DECODE),
        (others, longer, (1, 1), DECODE),
        (others, longer, (4, 4), DECODE),
        (prefills, cache, (60, 2), {}),
        (prefills, cache, (59, 2), {}),
        (prefills, cache, (0, 0), {}),
    ):
        before = len(workers.asked)
        requests.request_kernels(model, tensors, *sizes, rest)
        counts.append(len(workers.asked) - before)
    assert min(counts[0], counts[5]) > 5
    assert counts[1:5] + counts[6:] == [0, 1, 0, 0, 0, 0]
    assert workers.ran == 0


def test_the_next_process_asks_for_no_kernels_of_a_step_that_ran(step, monkeypatch, tmp_path):
    model, cache, *_ = step
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    first, second, other = (
        dry_runs.DryRuns(each) for each in (decode_step, decode_step, prefill_step)
    )
    for requests in (first, second, other):
        requests.request_kernels(model, cache, 1, 1, DECODE if requests is not other else {})
        first.ran()
    assert [bool(each.num_parts) for each in (first, second, other)] == [True, False, True]
    assert len(list(tmp_path.glob("dsv4_ops-*"))) == 1


def test_other_sizes_are_compiled_after_the_first(step, monkeypatch, tmp_path):
    """The process that compiled the first size requests the others, later ones do not."""
    model, cache, workers, _ = step
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "requests", lambda submit: submit(len, "") and nullcontext())
    for _ in range(2):
        requests = dry_runs.DryRuns(prefill_step)
        requests.request_others(model, cache, {})
        requests.request_kernels(model, cache, 60, 2, {})
        for _ in range(2):
            requests.request_others(model, cache, {})
        requests.ran()
        assert workers.urgent == [True] + [False] * len(dry_runs.OTHERS[prefill_step])
    assert len(list(tmp_path.glob("dsv4_ops-*"))) == 1


def test_hooks_and_forwards_of_a_user_are_not_called(step):
    model, cache, workers, _ = step
    called = []
    hook = model.model.layers[0].register_forward_hook(lambda *args: called.append(1))
    dry_runs.DryRuns(decode_step).request_kernels(model, cache, 1, 1, DECODE)
    hook.remove()
    assert (workers.asked, called) == ([], [])
    layer = model.model.layers[0].mlp
    before = layer.forward
    layer.forward = lambda *args, **rest: called.append(1) or before(*args, **rest)
    dry_runs.DryRuns(decode_step).request_kernels(model, cache, 1, 1, DECODE)
    assert (workers.asked, called) == ([], [])


def test_a_cpu_asks_for_nothing(step):
    model, cache, workers, _ = step
    cache = pytree.tree_map(lambda each: torch.empty(each.shape, dtype=each.dtype), cache)
    dry_runs.DryRuns(decode_step).request_kernels(model, cache, 1, 1, DECODE)
    assert workers.asked == []


def test_a_step_that_reads_values_is_left_to_its_launches(step, monkeypatch):
    model, cache, *_ = step
    said = []
    monkeypatch.setattr(dry_runs._log, "info", lambda text, error: said.append(str(error)))
    monkeypatch.setitem(
        dry_runs.PARTS, decode_step, lambda model, batch, *rest, **more: int(batch.rows[0])
    )
    dry_runs.DryRuns(decode_step).request_kernels(model, cache, 1, 1, DECODE)
    assert len(said) == 1


@pytest.fixture
def decode():
    """Return a decode of one layer on the CPU: the model, the batch and the cache."""
    model = v4.patch(small_model(layer_types=["sliding_attention"], mlp_layer_types=["moe"]))
    cache = v4.PagedCache.for_model(model, max_batch_size=2, max_cache_len=256)
    row = cache.add("a", num_tokens=9)
    starts, lens, rows = (torch.tensor(v, dtype=torch.int32) for v in ([0, 1], [1], [row]))
    batch = v4.StepBatch(torch.tensor([7]), starts, lens, rows)
    return model, batch, cache


def pages_of_another_size(cache):
    layer = cache.tensors.layers[0]
    pages = torch.cat([layer.swa, layer.swa], -1)
    return replace(cache.tensors, layers=(replace(layer, swa=pages),))


def test_a_cache_of_another_structure_is_checked_before_anything_is_written(decode):
    """The graphs work for any number of blocks, and do not check the blocks again."""
    model, batch, cache = decode
    step = v4.compile_step(model, mode="regional", dynamic=True, backend="eager")
    step(batch, cache)
    other = pages_of_another_size(cache)
    before = [each.clone() for each in pytree.tree_leaves(other)]
    with pytest.raises(ValueError, match=r"^attention_layer: caches.swa must .* got \[8, 74880\]"):
        step(batch, other)
    assert all(map(torch.equal, pytree.tree_leaves(other), before))


def test_a_trace_checks_what_no_dry_run_did(decode, monkeypatch):
    """If the model has a user's forward, a dry run cannot check it, so the trace does."""
    model, batch, cache = decode
    logits = v4.decode_step(model, batch, cache.tensors)
    monkeypatch.setattr(dry_runs, "calls_users", lambda model: True)
    other = v4.compile_step(model, mode="regional", dynamic=True, backend="eager")
    layer = cache.tensors.layers[0]
    signed = layer.swa.view(torch.int8)
    with pytest.raises(Exception, match=r"caches\.swa"):
        other(batch, replace(cache.tensors, layers=(replace(layer, swa=signed),)))
    cache.free("a")
    assert cache.add("a", num_tokens=9) == int(batch.rows)
    assert torch.equal(other(batch, cache), logits)


def test_a_dry_run_updates_no_copies_of_weights():
    """A changed weight stays uncopied in the dry run; the next step updates its copies."""
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")
    attention, dry = model.model.layers[0].self_attn, dry_runs.DryRuns(decode_step)
    before = dict(vars(attention)), dict(attention._buffers)
    attention.kv_b_proj.weight.data = attention.kv_b_proj.weight.detach() + 1
    assert dry.passes(model, cache_of(model, 1, 64), 1, 1, {})
    pairs = zip(before, (vars(attention), attention._buffers), strict=True)
    assert all(new[name] is each for old, new in pairs for name, each in old.items())


def test_checks_are_left_out_of_traces_only():
    def double(x):
        Checks("double").tensor("x", x, torch.int64, "num_tokens")
        return x + x

    compiled, x = torch.compile(double, backend="eager"), torch.ones(2)
    with checks_are_done():
        assert compiled(x).tolist() == [2, 2]
        with pytest.raises(TypeError, match=r"^double: x must be"):
            double(x)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="double: x must be"):
        compiled(x)
