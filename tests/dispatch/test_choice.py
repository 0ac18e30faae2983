"""``choice_of`` names the implementation that runs, for all cases of all ops. Tensors are on the
device meta, and launches are recorded instead of run."""

import dataclasses
import functools
import importlib
import inspect

import pytest
import torch

from dsv4_ops import testing
from dsv4_ops.cli.explain import records
from dsv4_ops.core.registry import OPS, REFERENCE, TRITON
from dsv4_ops.dispatch import choice, define, layers, limits
from dsv4_ops.dispatch.providers import choice_of
from dsv4_ops.testing.case import Case

pytest.importorskip("triton", reason="published for Linux only")
from dsv4_ops.cli import kernels
from dsv4_ops.kernels.launcher import Launcher

CAPABILITIES = {"Hopper": (9, 0), "Ampere": (8, 0)}
WITH_KERNEL = [name for name, spec in OPS.items() if spec.has_kernel]


@pytest.fixture(params=CAPABILITIES)
def gpu(request, monkeypatch):
    """Simulate a current GPU, whose tensors are on the device meta."""
    capability = CAPABILITIES[request.param]
    monkeypatch.setattr(choice, "DEVICES", ("meta",))
    monkeypatch.setattr(limits, "capability_of", lambda device: capability)
    return capability


def calls_of(name):
    """Return the cases of an op, and the example calls that `make kernels` compiles."""
    cases = [case.on("meta") for case in testing.cases_of(name)]
    examples = kernels.examples().items() if OPS[name].has_kernel else ()
    for variant, (tensors, settings) in examples:
        if variant.partition(",")[0] == name and "impl" not in settings:
            cases.append(Case(variant, tensors, settings))
    return cases


def what_runs(name, case, capability, monkeypatch):
    """Return the names of what an eager call runs; our kernels count as "triton"."""
    spec, ran = OPS[name], set()

    @functools.wraps(spec.reference)
    def reference(*args, **kwargs):
        ran.add(REFERENCE)
        values = spec.arguments(args, kwargs)
        return spec.meta(**{key: values[key] for key in inspect.signature(spec.meta).parameters})

    def launch_with(own, impl):
        ran.add(impl)
        return layers.launcher(own, impl)

    class Kernel:
        def __init__(self, kernel):
            pass

        def __getitem__(self, grid):
            return lambda *args, **kwargs: ran.add(TRITON)

    # a launcher that falls back on the reference calls this function, too
    monkeypatch.setattr(importlib.import_module(f"dsv4_ops.reference.{spec.stem}"), name, reference)
    monkeypatch.setattr(define, "_eager", lambda: Launcher(Kernel, capability=capability))
    observed = dataclasses.replace(spec, reference=reference, launch_with=launch_with)
    define._launch_rule(observed)(*case.tensors, **case.settings)
    return ran


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_what_is_chosen_runs_and_nothing_else(name, gpu, monkeypatch):
    chosen = set()
    for given in calls_of(name):
        said = choice_of(name, *given.tensors, **given.settings)
        with monkeypatch.context() as patched:
            assert what_runs(name, given, gpu, patched) == {said.impl}, (given.name, said)
        if said.impl == REFERENCE:
            assert name in limits.WORDS, said
        chosen.add(said.impl)
    assert TRITON in chosen or (name, gpu) == ("sparse_mla_gathered", (8, 0))


@pytest.mark.parametrize("name", [name for name in WITH_KERNEL if OPS[name].has_choice])
def test_our_kernel_runs_or_says_what_it_does_not_take(name, gpu):
    for given in calls_of(name):
        settings = {**given.settings, "impl": TRITON}
        if choice_of(name, *given.tensors, **given.settings).impl == TRITON:
            assert choice_of(name, *given.tensors, **settings) == (TRITON, "asked for")
        else:
            with pytest.raises(NotImplementedError, match=f"^{name}: impl must be 'auto'"):
                choice_of(name, *given.tensors, **settings)


@pytest.mark.parametrize("name", WITH_KERNEL)
def test_without_triton_the_reference_runs(name, gpu, monkeypatch):
    monkeypatch.setattr(limits, "no_triton", lambda: True)
    for given in calls_of(name):
        assert choice_of(name, *given.tensors, **given.settings).impl == REFERENCE
        with monkeypatch.context() as patched:
            assert what_runs(name, given, gpu, patched) == {REFERENCE}


def test_our_kernels_need_triton(gpu, monkeypatch):
    monkeypatch.setattr(limits, "no_triton", lambda: True)
    given = calls_of("fp8_linear")[0]
    with pytest.raises(ImportError, match=r"got 'triton'\. Install triton\."):
        choice_of("fp8_linear", *given.tensors, **{**given.settings, "impl": TRITON})


@pytest.mark.parametrize("name", [name for name in OPS if name not in WITH_KERNEL])
def test_an_op_without_a_kernel_runs_its_reference(name, gpu):
    for case in testing.cases_of(name):
        given = case.on("meta")
        assert choice_of(name, *given.tensors, **given.settings).impl == REFERENCE


@pytest.mark.parametrize("name", OPS)
def test_explain_says_the_same(name):
    (said,) = records(name)
    assert said["cuda"] == (TRITON if name in WITH_KERNEL else REFERENCE)
    assert said["elsewhere"] == REFERENCE
    assert limits.WORDS.get(name, "") in said["note"]
    assert bool(said["note"]) == (name in limits.WORDS)


def test_a_fake_changes_no_cache_key():
    """The key names the installed libraries from the import on."""
    before = torch.compiler.config.cache_key_tag
    for name in (name for name, spec in OPS.items() if spec.has_choice):
        testing.cases_of(name)[0].on("meta").run(OPS[name].op)
    assert torch.compiler.config.cache_key_tag == before
