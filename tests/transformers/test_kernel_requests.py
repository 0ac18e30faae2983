"""Steps ask workers for their kernels before they run, on a GPU that is not there."""

import pytest
import torch
from torch.utils import _pytree as pytree

from dsv4_ops.core.torch_compat import FakeTensorMode
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.steps import kernels
from dsv4_ops.integrations.transformers.steps.step import decode_step, prefill_step
from dsv4_ops.lowering import workers as inductor
from dsv4_ops.testing.models import small_model
from tests.support.hopper import Workers, hopper, on_cuda  # noqa: F401  # a fixture

DECODE = {"state_rings": False}


def cache_of(model, rows, length):
    return v4.PagedCache.for_model(model, max_batch_size=rows, max_cache_len=length).tensors


@pytest.fixture
def step(hopper, monkeypatch):  # noqa: F811
    """A model and a cache with fake weights on the GPU, what workers are asked, and a longer
    cache."""
    mode, workers = FakeTensorMode(allow_non_fake_inputs=True), Workers()
    monkeypatch.setattr(kernels, "FakeTensorMode", lambda **settings: mode)
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
    monkeypatch.setattr(kernels._log, "info", lambda text, error: pytest.fail(text % error))


def test_other_sizes_ask_for_others_alone(step):
    """Small batches share all kernels, and so do caches of any length: Triton would compile others
    where a count is 1, or a multiple of 16."""
    model, cache, workers, longer = step
    decodes, prefills = kernels.KernelRequests(decode_step), kernels.KernelRequests(prefill_step)
    others = kernels.KernelRequests(decode_step)
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
        requests.request(model, tensors, *sizes, rest)
        counts.append(len(workers.asked) - before)
    assert min(counts[0], counts[5]) > 5
    assert counts[1:5] + counts[6:] == [0] * 6
    assert workers.ran == 0


def test_hooks_and_forwards_of_a_user_are_not_called(step):
    model, cache, workers, _ = step
    called = []
    hook = model.model.layers[0].register_forward_hook(lambda *args: called.append(1))
    kernels.KernelRequests(decode_step).request(model, cache, 1, 1, DECODE)
    hook.remove()
    assert (workers.asked, called) == ([], [])
    layer = model.model.layers[0].mlp
    before = layer.forward
    layer.forward = lambda *args, **rest: called.append(1) or before(*args, **rest)
    kernels.KernelRequests(decode_step).request(model, cache, 1, 1, DECODE)
    assert (workers.asked, called) == ([], [])


def test_a_cpu_asks_for_nothing(step):
    model, cache, workers, _ = step
    cache = pytree.tree_map(lambda each: torch.empty(each.shape, dtype=each.dtype), cache)
    kernels.KernelRequests(decode_step).request(model, cache, 1, 1, DECODE)
    assert workers.asked == []


def test_a_step_that_reads_values_is_left_to_its_launches(step, monkeypatch):
    model, cache, *_ = step
    said = []
    monkeypatch.setattr(kernels._log, "info", lambda text, error: said.append(str(error)))
    monkeypatch.setitem(
        kernels.PARTS, decode_step, lambda model, batch, *rest, **more: int(batch.rows[0])
    )
    kernels.KernelRequests(decode_step).request(model, cache, 1, 1, DECODE)
    assert len(said) == 1
