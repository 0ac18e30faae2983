"""``compile_step`` compiles a step as one graph, or as one graph per kind of layer."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsv4_ops.core.checks import Checks, checks_are_done
from dsv4_ops.core.errors import argument_error, kind_of
from dsv4_ops.core.torch_compat import (
    group_sends,
    has_function_modes,
    note_trace,
    one_graph_for_all_sizes,
)
from dsv4_ops.dispatch.run_time_launches import run_time_launches
from dsv4_ops.integrations.transformers.architectures.base import ModelSpec, Runner
from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache
from dsv4_ops.integrations.transformers.compile_cache.calls import has_replaced_functions, packed
from dsv4_ops.integrations.transformers.compile_cache.precompiled import (
    Part,
    PartsFile,
    PartsFolder,
    Undescribed,
    Watch,
    compiled,
    described,
    environment,
    folder_of_parts,
    loaded,
    state,
    without_collections,
)
from dsv4_ops.integrations.transformers.modules.replacement import (
    has_global_hooks,
    local,
    with_methods,
)
from dsv4_ops.integrations.transformers.modules.split import groups_of
from dsv4_ops.integrations.transformers.steps.dry_runs import PARTS, DryRuns, structure_of
from dsv4_ops.integrations.transformers.steps.part_process import Job
from dsv4_ops.integrations.transformers.steps.part_processes import PartProcesses
from dsv4_ops.integrations.transformers.steps.progress import PartsBar
from dsv4_ops.integrations.transformers.steps.step import (
    check_cache,
    check_model,
    check_tensors,
    checked,
    decode_step,
    spec_of,
    tensors_of,
)
from dsv4_ops.integrations.transformers.tensors import CacheTensors, StepBatch

MOST_WHOLE = 8
"""Maximum number of layers that "auto" compiles as one graph. More layers would take too long."""

MOST_PLANS = 256
"""Maximum number of plans. A plan lists the parts of a step for one size. If this many plans exist,
the next plan replaces all of them."""

MOST_VARIANTS = 4
"""Maximum number of compiled parts with the same key (``CompiledStep._part_of``). Graphs of these
parts assume different sizes."""

MOST_CHANGES = 8
"""Maximum number of changes of the model. After more changes, only Dynamo's guards select parts."""

_OPTIONS = {"metadata": {"max_fusion_size": 16}}
"""For each part, Inductor's options on CUDA. By default, Inductor fuses the metadata into one
kernel of 1,000 lines, which Triton 3.6 compiles in 8 s. Several smaller kernels compile in parallel
in one second."""

_log = logging.getLogger(__name__)


def compile_step(
    model: Any,
    step: Callable[..., Tensor] = decode_step,
    *,
    mode: str = "auto",
    cache_file: str | os.PathLike[str] | None = None,
    on_part: Callable[[str], None] | None = None,
    **settings: Any,
) -> CompiledStep:
    """Compile ``decode_step`` or ``prefill_step`` of a patched model.

    Args:
        model: A patched model.
        step: ``decode_step`` or ``prefill_step``.
        mode: "whole" compiles one graph, as ``torch.compile(step, fullgraph=True)`` does.
            "regional" compiles one graph per kind of layer (four in the released models, however
            many layers they have) and three graphs for the rest of the model; a CUDA graph can
            still capture the whole step. "auto" is "regional" for more than 8 layers, else "whole".
        cache_file: File that keeps compiled code for the next process. The compiled step reads this
            file if it exists, and writes it after a call that compiled something new. None keeps
            parts in the folder that the environment variable DSV4_OPS_CACHE names, by default
            ``~/.cache/dsv4_ops`` ("off" keeps none), and their kernels in the cache folders of
            torch and Triton. A part is reused, without a trace, if nothing that it depends on has
            changed: the sources of this package, the versions, the settings, the device, and
            everything that a trace can read of the model and its inputs. An outdated part never
            runs. Triton's autotuning is reused if TORCHINDUCTOR_CACHE_DIR has the same path, and
            repeated otherwise. Loading a part runs its code: load only files that you wrote.
        on_part: Function that is called with the name of every part before the part is compiled or
            loaded. None shows a progress bar on a terminal, and one line elsewhere, unless
            transformers' progress bars are disabled.
        settings: Settings of ``torch.compile``; ``fullgraph=True`` and ``dynamic=False`` by
            default. Parts of other backends than Inductor are not kept. With ``dynamic=True`` one
            graph per part serves all numbers of tokens and requests, and all cache sizes. On CUDA,
            the graph then calls our ops, which choose tiles by the real sizes as in eager mode.
            Capture the step in CUDA graphs to hide the host time of these calls. If parts
            can be stored, no ranks share the model, and there are 8 cores, up to four other
            processes compile parts during a first step on CUDA; DSV4_OPS_COMPILE_PROCESSES limits
            their number.

    Returns:
        A function that takes the batch, the cache and the keyword arguments of ``step``. The
        function returns and writes the same as ``step``. Ranks that share the cache first compare
        the shapes of their arguments on the host, and all raise ValueError if the shapes differ.
        Ranks compare only if their process group sends CPU tensors ("cpu:gloo,cuda:nccl").

    Raises:
        ValueError, TypeError: the model is not patched, ``step``, ``mode`` or a setting is unknown,
            or ``cache_file`` is a folder or is in a folder that does not exist.

    Example:
        >>> import torch
        >>> from dsv4_ops.testing.models import small_model
        >>> from dsv4_ops.integrations import transformers as v4
        >>> model = v4.patch(small_model(), kv="fp32", precision="reference")
        >>> cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=256)
        >>> row = cache.add("a", num_tokens=1)
        >>> starts, lens, rows = (torch.tensor(v, dtype=torch.int32) for v in ([0, 1], [1], [row]))
        >>> batch = v4.StepBatch(torch.tensor([7]), starts, lens, rows)
        >>> step = v4.compile_step(model, mode="regional", backend="eager")
        >>> step(batch, cache).shape, len(step.parts)
        (torch.Size([1, 260]), 6)
    """
    op = "compile_step"
    spec = spec_of(op, model)
    checks = Checks(op)
    modes = ("auto", "whole", "regional")
    checks.one_of("mode", mode, *modes, belongs_to="suits the model; auto chooses it")
    if not any(step is each for each in PARTS):
        raise argument_error(
            op,
            "step",
            must="be decode_step or prefill_step",
            got=getattr(step, "__name__", step),
            do="Pass one of these",
        )
    if on_part is not None and not callable(on_part):
        raise checks.error(
            "on_part",
            must="be a function of a part's name, or None",
            got=kind_of(on_part),
            do="Pass print, say",
            kind=TypeError,
        )
    check_settings(op, settings)
    regional = mode == "regional" or (mode == "auto" and len(spec.kinds) > MOST_WHOLE)
    path = None if cache_file is None else checks.path("cache_file", cache_file)
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise argument_error(
            op,
            "cache_file",
            must="be a file, or the name for one in a folder that is there",
            got=repr(str(path)),
            do="Name a file in that folder" if path.is_dir() else "Make the folder",
        )
    return CompiledStep(model, step, regional, path, on_part, settings)


def check_settings(op: str, settings: dict[str, Any]) -> None:
    """Raise if a name is no setting of ``torch.compile``, or if a value has a wrong type."""
    checks = Checks(op)
    names = [name for name in inspect.signature(torch.compile).parameters if name != "model"]
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise checks.error(
            unknown[0],
            must="be a setting of torch.compile",
            got="an unknown name",
            do=f"It takes {', '.join(names)}",
            kind=TypeError,
        )
    for name in ("fullgraph", "dynamic"):
        if settings.get(name) is not None or (name == "fullgraph" and name in settings):
            checks.flag(name, settings[name])
    checks.kind("options", settings.get("options"), dict, must="be a dict", do="Pass it, or None")
    check_backend(op, "backend", settings.get("backend", "inductor"))


def check_backend(op: str, name: str, backend: Any) -> None:
    """Raise if ``torch.compile`` does not know a backend."""
    known = torch.compiler.list_backends(exclude_tags=())  # also backends for debugging only
    if not callable(backend) and not (isinstance(backend, str) and backend in known):
        names = ", ".join(["eager", "aot_eager", *torch.compiler.list_backends()])
        raise argument_error(
            op,
            name,
            must=f"be a backend of torch.compile ({names}), or a function",
            got=repr(backend),
            do="Pass inductor",
        )


class CompiledStep:
    """A compiled step of a model, made by ``compile_step``.

    ``of_parts`` is a function that runs the step in parts, in place of ``decode`` or ``prefill``.
    No part may depend on the keyword arguments of ``of_parts``.

    Attributes:
        parts: Compiled parts by name: one per kind of layer and three for the rest, or only "step".
    """

    def __init__(
        self,
        model: Any,
        step: Callable[..., Tensor],
        regional: bool,
        cache_file: Path | None,
        on_part: Callable[[str], None] | None,
        settings: dict[str, Any],
        of_parts: Callable[..., Any] | None = None,
    ) -> None:
        self.model, self._patched = model, model
        self._of_parts = of_parts
        self._watch: Watch | None = None
        self._hooks: Watch | None = None
        self._hooked: dict[int, int] = {}
        self.step, self.regional, self._on_part = step, regional, on_part
        self.settings = {"fullgraph": True, "dynamic": False, **settings}
        self.parts: dict[str, Callable[..., Any]] = {}
        self._jits: dict[str, Callable[..., Any]] = {}
        self._file = _parts(cache_file, self.settings)
        self._bar = PartsBar(step.__name__, self._file)
        self._loaded: frozenset[str] | None = None
        self._compiled = False
        self._kept: dict[str, Part] = {}
        self._digests, self._described = dict[Any, str](), Watch()
        self._plans: dict[Any, _Plan] = {}
        self._changes = 0
        self._shared: list[tuple[dict[str, Any], str, int]] | None = None
        self._cache: tuple[Any, str, Any] = (lambda: None, "", None)
        self._spec = spec_of("compile_step", model)
        self._dry_runs = DryRuns(step, of_parts)
        self._passed: tuple[Any, dict[str, Any], bool] = (lambda: None, {}, False)
        if self._is_new() and model.device.type == "cuda":
            from dsv4_ops.lowering.workers import start_workers

            start_workers()  # the first call will need the workers
        ranks = self._spec.parallel
        self._groups = groups_of(model, ranks)
        self._processes, self._sent = PartProcesses(model.device), dict[str, Any]()
        self._ranks = ranks if ranks is not None and group_sends(ranks.group, "cpu") else None

    def __call__(self, batch: StepBatch, cache: CacheTensors | PagedCache, **rest: Any) -> Any:
        """Run the step; the first call compiles."""
        with torch.no_grad(), self._bar:
            with self._all_sizes(), nullcontext() if self.parts else without_collections():
                try:
                    found = self._stepped(batch, cache, **rest)
                except Exception as error:
                    if type(error).__module__.startswith("torch._dynamo"):
                        self._explain(cache)
                    raise
                finally:
                    self._processes.close()
            return found

    def _is_new(self) -> bool:
        """Whether parts can be stored, but no process has stored any."""
        return self._file is not None and self._file.takes_parts and self._file.is_empty()

    def __repr__(self) -> str:
        mode = "regional" if self.regional else "whole"
        sizes = "all sizes" if self.settings["dynamic"] else "fixed sizes"
        parts = ", ".join(self.parts) or "none yet"
        place = "" if self._file is None else f", kept in {str(self._file)!r}"
        return f"CompiledStep({self.step.__name__}, {mode!r}, {sizes}, parts: {parts}{place})"

    def _explain(self, cache: CacheTensors | PagedCache) -> None:
        """Repeat the checks outside of the trace, because Dynamo replaces the error of a check that
        fails in a trace."""
        op = self.step.__name__
        check_cache(op, spec_of(op, self._patched), tensors_of(op, cache))
        check_model(self.step.__name__, self._patched, self._patched.device)
        if getattr(self._patched.config, "_experts_implementation", None) == "eager":
            raise argument_error(
                "compile_step",
                "experts_implementation",
                must="be 'grouped_mm' or 'batched_mm', as a loop over experts is no graph",
                got="'eager'",
                do="Call model.set_experts_implementation('grouped_mm')",
                kind=NotImplementedError,
            )

    def form(self, batch: StepBatch, cache: CacheTensors, **rest: Any) -> Any:
        """Return the parts and the weight addresses that a CUDA graph of this step depends on, or
        None.

        A program may replay the graph while the result of this method stays equal. The call also
        makes the updates that a step makes outside of graphs. None means that the step is not
        regional, has not run yet, or keeps no parts.
        """
        if not self.regional:
            return None
        with torch.no_grad(), self._all_sizes():
            self._follow()
            sizes = len(batch.tokens), len(batch.rows)
            passes = functools.partial(self._passes, cache, sizes, rest)
            key, run = self._planned(batch, cache, rest, passes)
            if key is None or isinstance(run, _Recorder):
                self._plans.pop(key, None)
                return None
            checked(self.step.__name__, self.model, batch, cache, self._shares())
            tensors = (*self.model.parameters(), *self.model.buffers())
            return self._plans[key], [local(each).data_ptr() for each in tensors]

    def _all_sizes(self) -> AbstractContextManager[None]:
        return traces_for_all_sizes() if self.settings["dynamic"] else nullcontext()

    def _stepped(self, batch: StepBatch, cache: CacheTensors | PagedCache, **rest: Any) -> Any:
        op = self.step.__name__
        tensors = tensors_of(op, cache)
        # check here: Dynamo replaces errors that are raised in a graph
        check_tensors(op, batch, tensors)
        of_parts = {} if self._of_parts else rest
        _check_options(op, of_parts)
        if self.regional:
            self._follow()
        captures = tensors.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._ranks is not None and not captures:  # a rank that raised above does not compare
            shapes = {"num_tokens": len(batch.tokens), "num_reqs": len(batch.rows)}
            self._ranks.agree("compile_step", "batch", "cpu", **shapes, **of_parts)
        sizes = len(batch.tokens), len(batch.rows)
        if self.settings["dynamic"]:
            if not self.parts and self._is_new() and self._can_send():
                self._processes.start()
            self._dry_runs.request_kernels(self.model, tensors, *sizes, of_parts)
            self._dry_runs.request_others(self.model, tensors, of_parts)
        passes = functools.partial(self._passes, tensors, sizes, of_parts)
        key, run = self._planned(batch, tensors, of_parts, passes)
        self._bar.is_kept = key is not None
        if self.regional:
            rest = {**rest, "run": run, "shared": self._shares()}
            # if the plan has a key, stored parts need no checks, and ``_variant`` calls ``passes``
            # before it compiles a part
            done = key is None and passes()
            with checks_are_done() if done else nullcontext():
                found = (self._of_parts or PARTS[self.step])(self.model, batch, tensors, **rest)
            if self._shared is None:
                self._shared = _shared_weights(self.model.model)
        else:
            self._refresh(op, tensors.device)
            found = run("step", self.step, self.model, batch, tensors, **rest)
        if isinstance(run, _Recorder):
            self._plans[key] = run.plan
            if not run.asks:
                self._dry_runs.note(tensors, of_parts)
        self._dry_runs.ran()
        if self._compiled:
            self._compiled = False
            self._write()
        return found

    def _passes(self, cache: CacheTensors, sizes: tuple[int, int], rest: dict[str, Any]) -> bool:
        """Whether all checks of the step pass in a run with fake tensors."""
        if not (self.regional or self.settings["dynamic"]):
            return False
        known, options, passed = self._passed
        if known() is not cache or options != rest:
            passed = self._dry_runs.passes(self.model, cache, *sizes, rest)
            self._passed = weakref.ref(cache), rest, passed
        return passed

    def _follow(self) -> None:
        """Copy the model again if a module, an attribute or a hook has changed."""
        hooked = self._hooks is not None and not self._hooks.unchanged()
        if hooked:  # Dynamo does not guard hooks
            self._jits.clear()
        if self._watch is None or hooked or not self._watch.unchanged():
            self._changes += len(self._plans) > 0
            self._plans.clear()
            self._digests.clear()
            self.model, self._watch, self._hooks = with_methods(self._patched), Watch(), Watch()
            self._shared = None
            self._dry_runs.forget_model()
            self._passed = lambda: None, {}, False
            self._hooked = {
                id(layer): index
                for index, layer in enumerate(self.model.model.layers)
                if any(each._forward_hooks or each._forward_pre_hooks for each in layer.modules())
            }
            for module in self._patched.modules():
                self._watch.add(vars(module))
                self._watch.add(module._modules)
                self._hooks.add(module._forward_hooks)
                self._hooks.add(module._forward_pre_hooks)

    def _refresh(self, op: str, device: torch.device) -> None:
        """Refresh the buffers that ``patch`` added; first check the modules, unless all buffers
        still share the weights' memory. A graph can do neither."""
        body = self.model.model
        if self._shares():
            self._spec.refresh(op, body, copies_only=True)
        else:
            check_model(op, self.model, device)
            self._spec.refresh(op, body)
            self._shared = _shared_weights(body)

    def _shares(self) -> bool:
        """Whether the buffers that ``patch`` added still share the weights' memory. False before
        the first step."""
        if self._shared is None:
            return False
        kept = all(
            name in parameters and local(parameters[name]).data_ptr() == at
            for parameters, name, at in self._shared
        )
        self._shared = self._shared if kept else None
        return kept

    def _planned(
        self,
        batch: StepBatch,
        cache: CacheTensors,
        rest: dict[str, Any],
        passes: Callable[[], bool],
    ) -> tuple[Any, Runner]:
        """Return the key of the step's plan, and a runner that follows or records this plan.

        If the step cannot have a plan, the key is None, and Dynamo's guards select the parts.
        """
        if self._file is None or not self._file.takes_parts or self._changes > MOST_CHANGES:
            return None, self._run
        if has_global_hooks() or has_function_modes():
            return None, self._run
        # parts of a plan have no guards, so dry runs must make the checks
        if self.settings["dynamic"] and not self._dry_runs.may_pass(self.model):
            return None, self._run
        try:
            if self._cache[0]() is not cache:
                self._cache = weakref.ref(cache), described([cache]), structure_of(cache)
            key = ((*state(cache.device), *self._groups), self._cache[1], described([batch, rest]))
        except Undescribed as error:
            _log.info("a step is not kept: %s", error)
            return None, self._run
        plan = self._plans.get(key)
        if plan is not None and plan.watch.unchanged():
            return key, plan.runner()
        self._changes += plan is not None
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        if not self.settings["dynamic"]:
            return key, _Recorder(self._part_of, _Plan(key[0], Watch()), passes, dict)
        if not self._described.unchanged():
            self._digests, self._described = {}, Watch()
            if not self.regional:  # in a regional step, ``_follow`` does this
                self._dry_runs.forget_model()
                self._passed = lambda: None, {}, False
        gaps = [None if each.is_contiguous() else each.stride() for each in vars(batch).values()]
        shared = self.step.__name__, key[0], self._cache[2], gaps, rest
        sizes = len(batch.tokens), len(batch.rows)
        calls = functools.partial(self._dry_runs.calls, self.model, cache, *sizes, rest)
        plan = _Plan(key[0], self._described, shared)
        return key, _Recorder(self._part_of, plan, passes, calls)

    def _part_of(self, run: _Recorder, name: str, call: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the part compiled for this call; compile it at the first call."""
        assert self._file is not None
        plan = run.plan
        name = self._name_of(name, call[0])
        try:
            key = f"{name}/{self._digest(plan, name, call)}"
        except Undescribed as error:
            _log.info("%s is not kept: %s", name, error)
            return self._jitted(name)
        part = self._variant(run, name, key, call)
        if part is None:
            return self._jitted(name)
        self.parts.setdefault(name, part.run)
        return part.run

    def _variant(self, run: _Recorder, name: str, key: str, call: tuple[Any, ...]) -> Part | None:
        """Return the part of this key whose assumptions hold for the sizes of a call, or None.

        Most keys have one part. A key has several parts if a graph makes assumptions about sizes,
        such as at least two tokens.
        """
        assert self._file is not None
        for number in range(MOST_VARIANTS):
            place = f"{key}.{number}"
            part = self._kept.get(place)
            if part is None:
                self._announce(name)
                content = self._file.find(place)
                if content is not None:
                    part = loaded(content, globals(), self._file.place(place))
            if part is None and name not in run.plan.compiled:
                # compile a name once per plan; other calls with this name go to Dynamo, whose
                # guards compare only what a trace reads
                is_first = not run.plan.compiled
                run.plan.compiled.add(name)
                done = run.passes()
                if self.settings["dynamic"] and not done:
                    return None
                self._load()
                if is_first and done:
                    self._send_others(run, name)
                content = self._processes.take(place)
                if content is not None and self._sent.pop(place, None) == structure_of_call(call):
                    part = loaded(content, globals(), f"{name} of another process")
                if part is None:
                    with checks_are_done() if done else nullcontext():
                        made = compiled(part_named(name), call, self._settings_of(name))
                    part, content = (None, None) if made is None else made
                if part is not None and content is not None:
                    self._file.keep(place, content)
            if part is None:
                return None
            self._kept[place] = part
            if part.takes(*call):
                return part
        return None

    def _send_others(self, run: _Recorder, name: str) -> None:
        """Let other processes compile all missing parts but this one."""
        if not (self._can_send() and self._processes.are_allowed()):
            return
        assert self._file is not None
        jobs: dict[str, Job] = {}
        digests = dict(self._digests)
        try:
            calls = run.calls()
        except Exception as error:  # only the dry run for another size passed
            _log.info("no part is sent to another process: %s", error)
            return
        calls.pop(name, None)
        for other, call in calls.items():
            try:
                place = f"{other}/{self._digest(run.plan, other, call)}.0"
                if self._kept.get(place) is None and self._file.find(place) is None:
                    jobs[place] = self._job(other, call)
                    self._sent[place] = structure_of_call(call)
            # pickle passes on any error of an object's own methods
            except Exception as error:  # noqa: PERF203 - there are seven parts
                _log.info("%s is not sent to another process: %s", other, error)
        self._digests = digests  # keep no digest of a dry run's call
        if jobs and self._processes.start():
            self._processes.send(jobs)

    def _job(self, name: str, call: tuple[Any, ...]) -> Job:
        device, settings = self._patched.device, self._settings_of(name)
        return Job(
            name=name,
            call=packed(call),
            described=described_call(call),
            settings=settings,
            environment=environment(settings),
            device=device,
            state=state(device),
            precision=torch.get_float32_matmul_precision(),
        )

    def _can_send(self) -> bool:
        """Whether other processes can compile parts. They have no process groups, and call
        torch's functions as torch defines them."""
        can = self.regional and self.settings["dynamic"] and not self._groups
        return can and not has_replaced_functions()

    def _digest(self, plan: _Plan, name: str, call: tuple[Any, ...]) -> str:
        """Describe a call. Leave out sizes if sizes are symbolic. ``plan.shared`` describes the
        structure of the cache, which determines the fields of a ``StepRun``."""
        function, args, rest = call
        if plan.shared is None:
            return described([plan.state, function, *args, *rest, *rest.values()], plan.watch)
        # a part that takes only tensors, such as the head, serves other steps and caches too
        takes_tensors = all(isinstance(each, Tensor) for each in (*args, *rest.values()))
        shared = plan.state if takes_tensors else plan.shared
        place = (name, id(function), repr(shared))
        if place not in self._digests:
            self._digests[place] = described_call(call, plan.watch, [shared])
        return self._digests[place]

    def _run(self, name: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        return self._jitted(self._name_of(name, function))(function, args, rest)

    def _name_of(self, name: str, function: Any) -> str:
        """Return the name of a part. A layer with hooks has a name of its own, because Dynamo does
        not guard hooks."""
        index = self._hooked.get(id(function))
        return name if index is None else f"{name}_{index}"

    def _jitted(self, name: str) -> Callable[..., Any]:
        if name not in self._jits:
            self._announce(name)
            self._load()
            self._jits[name] = torch.compile(part_named(name), **self._settings_of(name))
            self.parts.setdefault(name, self._jits[name])
        return self._jits[name]

    def _settings_of(self, name: str) -> dict[str, Any]:
        """Return the settings of ``torch.compile`` for a part. The caller's options override
        ours."""
        settings = self.settings
        is_inductor = settings.get("backend", "inductor") == "inductor"
        if not (is_inductor and name in _OPTIONS and self._patched.device.type == "cuda"):
            return settings
        return {**settings, "options": {**_OPTIONS[name], **(settings.get("options") or {})}}

    def _announce(self, name: str) -> None:
        if name in self.parts:
            return
        if self._on_part is None:
            self._bar.begin(name, self._num_parts())
        else:
            self._on_part(name)

    def _num_parts(self) -> int | None:
        return self._dry_runs.num_parts if self.regional else 1

    def _load(self) -> None:
        """Load the entries of torch's caches. Only a step that compiles a part needs these
        entries."""
        self._bar.compiles(self._num_parts())
        self._compiled = True
        if self._loaded is None:
            self._loaded = _load(None if self._file is None else self._file.caches)

    def _write(self) -> None:
        """Write what this process compiled, unless it compiled nothing new."""
        if not isinstance(self._file, PartsFile):
            return
        saved = torch.compiler.save_cache_artifacts()
        caches, keys = (None, frozenset()) if saved is None else (saved[0], _keys(saved[1]))
        if self._file.has_more or not keys <= (self._loaded or frozenset()):
            self._file.write(caches)
            self._loaded = (self._loaded or frozenset()) | keys


@contextmanager
def traces_for_all_sizes() -> Iterator[None]:
    """Make traces of ``torch.compile(dynamic=True)`` that are valid for all sizes."""
    with one_graph_for_all_sizes(), run_time_launches():
        yield


def described_call(
    call: tuple[Any, ...], watch: Watch | None = None, shared: Sequence[Any] = ()
) -> str:
    """Describe a call of a part with symbolic sizes. Leave out the sizes of its arguments."""
    function, args, rest = call
    leaves = [_form(each) for each in pytree.tree_leaves((args, rest))]
    return described([*shared, function, *leaves], watch)


def structure_of_call(call: tuple[Any, ...]) -> Any:
    """Return the arguments of a call, with the type of each tensor in its place. A dry run and
    compiled metadata must give a part the same arguments; but where one passes a tensor twice, the
    other may pass two tensors with equal numbers."""

    def structure(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.device, value.dim()
        if is_dataclass(value):
            return type(value), [structure(getattr(value, each.name)) for each in fields(value)]
        if isinstance(value, (tuple, list)):
            return type(value), [structure(each) for each in value]
        if isinstance(value, dict):
            return [(name, structure(each)) for name, each in value.items()]
        return value if isinstance(value, (bool, int, float, str, NoneType)) else type(value)

    return structure(call[1:])


def _form(leaf: Any) -> Any:
    """Return the properties of an argument on which a part with symbolic sizes depends."""
    if isinstance(leaf, Tensor):
        gaps = None if leaf.is_contiguous() else leaf.stride()
        return leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad, gaps
    plain = (nn.Module, ModelSpec, bool, int, float, str, NoneType)
    return leaf if isinstance(leaf, plain) else type(leaf)


def _check_options(op: str, options: dict[str, Any]) -> None:
    """Raise if a name is no keyword argument of the step, or if a value is not a bool."""
    names = ("state_rings",) if op == decode_step.__name__ else ("has_context",)
    for name, value in options.items():
        if name not in names:
            raise argument_error(
                op,
                name,
                must="be an argument of the step",
                got="an unknown name",
                do=f"It takes {', '.join(('batch', 'cache', *names))}",
                kind=TypeError,
            )
        Checks(op).flag(name, value)


def _shared_weights(body: Any) -> list[tuple[dict[str, Any], str, int]]:
    """Return the dictionary, name and address of each parameter that shares memory with a buffer.
    The buffer keeps the memory alive, so no other weight can get this address."""
    storages = {each.untyped_storage().data_ptr() for each in body.buffers() if each.nbytes}
    weights = [
        (module._parameters, name, local(weight))
        for module in body.modules()
        for name, weight in module._parameters.items()
        if weight is not None
    ]
    return [
        (parameters, name, weight.data_ptr())
        for parameters, name, weight in weights
        if weight.untyped_storage().data_ptr() in storages
    ]


def _parts(cache_file: Path | None, settings: dict[str, Any]) -> PartsFile | PartsFolder | None:
    """Return the file or folder that stores parts, or None."""
    if cache_file is not None:
        return PartsFile(cache_file, settings)
    folder = folder_of_parts()
    try:
        return None if folder is None else PartsFolder(folder, settings)
    except Undescribed as error:
        _log.info("no part is kept: %s", error)
        return None


class _Plan:
    """The parts of a call in order, and a watch of the objects on which the parts depend."""

    def __init__(self, state: Any, watch: Watch, shared: Any = None) -> None:
        self.state, self.watch, self.shared = state, watch, shared
        self.parts: list[Callable[..., Any]] = []
        self.compiled: set[str] = set()

    def runner(self) -> Runner:
        """Return a ``Runner`` that calls the parts in order."""
        parts = iter(self.parts)

        def run(_: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
            return next(parts)(function, args, rest)

        return run


class _Recorder:
    """A ``Runner`` that records a plan.

    Attributes:
        asks: Whether the runner has called ``passes``. ``passes`` says whether all checks pass.
        calls: Function that returns the first call of each part, by the part's name.
    """

    def __init__(
        self,
        part_of: Callable[..., Any],
        plan: _Plan,
        passes: Callable[[], bool],
        calls: Callable[[], dict[str, tuple[Any, ...]]],
    ) -> None:
        self.plan, self._part_of, self._passes, self.asks = plan, part_of, passes, False
        self.calls = calls

    def passes(self) -> bool:
        self.asks = True
        return self._passes()

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **rest: Any) -> Any:
        part = self._part_of(self, name, (function, args, rest))
        self.plan.parts.append(part)
        with checks_are_done() if self.asks and self._passes() else nullcontext():
            return part(function, args, rest)


def part_named(name: str) -> FunctionType:
    # each part has its own code object, as Dynamo tries all cache entries of a code object
    return FunctionType(_part.__code__.replace(co_name=name), globals())


def _part(function: Callable[..., Any], args: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    note_trace()
    return function(*args, **rest)


def _load(caches: bytes | None) -> frozenset[str]:
    """Load entries of torch's caches, and return their keys."""
    if caches is None:
        return frozenset()
    return _keys(torch.compiler.load_cache_artifacts(caches))


def _keys(info: Any) -> frozenset[str]:
    artifacts = {} if info is None else info.artifacts
    return frozenset(key for keys in artifacts.values() for key in keys)
