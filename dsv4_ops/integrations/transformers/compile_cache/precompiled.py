"""Compile parts of a step, and store and load them.

A stored part has the results of Dynamo, AOTAutograd and Inductor, as torch saves them for
``aot_compile``, but no guards of Dynamo. In place of guards, a part has a name, which
``environment`` and ``described`` compute. No name depends on numbers in tensors. A name covers the
process groups that a step uses, and this process's rank in each.

- With fixed sizes, the name is a digest of all that a trace can read of the process, the model, the
  batch and the cache.
- With symbolic sizes, the name is a digest of all that a trace can read of the process and the
  model, and of the structure of the cache. The checks of the step have passed for the batch, the
  cache and the model. A part stores the assumptions of its graph about sizes (``SizeGuards``),
  which are checked once for each new set of sizes. If the assumptions do not hold, another part of
  the same name may fit. These variants of a name are numbered.

A step looks its parts up again when ``Watch`` sees that an object in the description was replaced.

Torch's own caches do not store all that this module stores. These times are for the four parts of a
small V3, on a CPU with torch 2.15. A process that loads the stored parts takes 0.2 CPU seconds and
traces no graph.

- With ``save_cache_artifacts`` the next process traces 4 graphs and compiles their C++ kernels (10
  s). With ``caching_precompile`` it traces 3 graphs (14 s), because only 1 part of 4 is saved.
- ``aot_compile`` cannot save 109 of the 485 guards of a layer, so hooks and replaced methods are
  not noticed. With the other guards, a step takes 7.0 ms; without guards, it takes 1.5 ms.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import hashlib
import importlib
import importlib.util
import io
import itertools
import json
import logging
import operator
import os
import platform
import sys
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any

import torch
import torch.compiler.config as compiler_config
from torch import Tensor, nn

from dsv4_ops.core.fingerprint import source_hash
from dsv4_ops.core.torch_compat import (
    FakeTensor,
    SizeGuards,
    allows_aot_compile,
    aot_settings,
    noted_trace,
    sources_noted_once,
    without_kernel_table,
)
from dsv4_ops.dispatch import libraries
from dsv4_ops.integrations.transformers.compile_cache import kernel_files
from dsv4_ops.integrations.transformers.modules.replacement import (
    REPLACED,
    SOURCE,
    is_split,
    local,
)
from dsv4_ops.integrations.transformers.modules.split import FORWARD_OF_PLAN

_log = logging.getLogger(__name__)

_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_WITH_OPS = ("dsv4_ops.kernels.", "dsv4_ops.lowering.")
"""Modules that register ops at import; a trace imports some of these modules."""

_UNREAD = (
    "layer_idx", SOURCE, "generation_config", FORWARD_OF_PLAN,
    "hf_quantizer", "_weight_conversions",  # of loaded models: regexes, and lists made from sets
)  # fmt: skip
"""Attributes of modules that differ between layers of a kind, or between processes; ``compiled``
checks that no trace reads these attributes."""


_UNREAD_NAMES = (
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__annotate_func__",
    "__dataclass_fields__", "__dataclass_params__", "__abstractmethods__", "_abc_impl",
    "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__", "__slotnames__",
)  # fmt: skip
"""Names in classes that a trace does not read."""

_UNREAD_OF_MODULES = (
    "__init__", "_can_set_attn_implementation_cached_value",
    "_can_set_experts_implementation_cached_value",
)  # fmt: skip
"""Names in classes of modules that a trace does not read. transformers assigns them when it builds
or loads a model."""


class Watch:
    """A record of what containers and attributes held when a description read them, to detect later
    changes."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._sizes: list[int] = []
        self._items: list[Any] = []
        self._inner: list[tuple[Any, str, Any]] = []
        self._tensors: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}

    def add(self, held: Mapping[str, Any] | list[Any]) -> None:
        """Record the contents of a dictionary or a list."""
        if id(held) not in self._held:
            values = held if isinstance(held, list) else held.values()
            # store the view: to make a view in each call would take longer than the comparison
            self._held[id(held)] = (held, values)
            self._sizes.append(len(values))
            self._items += values

    def add_attribute(self, owner: Any, name: str) -> None:
        """Record an attribute that is not in a dictionary: an attribute of an object with slots, or
        a cell of a closure."""
        self._inner.append((owner, name, _attribute(owner, name)))

    def add_tensor(self, tensor: Tensor, form: tuple[Any, ...]) -> None:
        """Record dtype, device, shape and strides of a tensor, because a program that replaces the
        data can change these properties."""
        self._tensors[id(tensor)] = (tensor, form)

    def unchanged(self) -> bool:
        """Whether all containers and attributes hold the same objects as before."""
        views = [values for _, values in self._held.values()]
        if list(map(len, views)) != self._sizes:
            return False
        if not all(map(operator.is_, itertools.chain.from_iterable(views), self._items)):
            return False
        if not all(_attribute(owner, name) is value for owner, name, value in self._inner):
            return False
        return all(_form(tensor) == form for tensor, form in self._tensors.values())


class Undescribed(Exception):
    """A value that two processes cannot compare."""


def described(values: Sequence[Any], watch: Watch | None = None) -> str:
    """Return a digest of all that a trace can read of ``values``, except for numbers in tensors.

    Two processes get the same digest if types, sizes, constants and code are equal, and if the same
    tensors are shared or share memory in both. Attributes that only number layers are left out.

    Raises:
        Undescribed: a value is a process group, a tensor subclass other than a distributed tensor,
            or an object without attributes.
    """
    walk = _Walk(Watch() if watch is None else watch)
    for value in values:
        walk.add(value)
    return walk.digest()


def _attribute(owner: Any, name: str) -> Any:
    """Return the value of an attribute, or ``Watch`` if the attribute is missing."""
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # an empty cell of a closure raises ValueError
        return Watch


@functools.lru_cache(maxsize=8)
def _ranks_of(mesh: Any) -> list[Any]:
    """Return the ranks of a device mesh, which torch computes again in each call."""
    ranks: list[Any] = mesh.mesh.tolist()
    return ranks


def _type(value: Any) -> type:
    """Return the type of a value; for a fake tensor, the type of the tensor that it replaces."""
    if isinstance(value, FakeTensor):
        return nn.Parameter if isinstance(value, nn.Parameter) else Tensor
    return type(value)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


class _Walk:
    """A walk over values, which ``digest`` summarises. A walk that is not deep describes only the
    types of objects, and of containers other than tuples."""

    def __init__(self, watch: Watch, is_deep: bool = True) -> None:
        self._words: list[str] = []
        self._watch, self._is_deep = watch, is_deep
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._kinds: set[tuple[type, tuple[str, ...]]] = set()
        self._storages: dict[int, tuple[int, int]] = {}

    def add(self, value: Any) -> None:
        word = _word(value)
        if word is not None:
            self._words.append(word)
        elif isinstance(value, tuple):  # equal tuples may be one object or several
            self._words.append(_name(type(value)))
            self._add_all(*value)
        elif id(value) in self._seen:
            self._words.append(f"again {self._seen[id(value)]}")
        else:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)  # keep the object alive, so that no other object gets its id
            self._words.append(_name(_type(value)))
            self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, (MethodType, staticmethod, classmethod)):
            self._add_all(value.__func__, getattr(value, "__self__", None))
        elif isinstance(value, property):
            self._add_all(value.fget, value.fset)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif not self._is_deep:
            return
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, (set, frozenset)):
            self._add_all(*sorted(value, key=repr))
        elif isinstance(value, list):
            self._watch.add(value)
            self._add_all(*value)
        elif isinstance(value, (dict, MappingProxyType)):
            self._add_dict(value)
        elif isinstance(value, functools.partial):
            self._add_all(value.func, value.args, value.keywords)
        else:
            self._add_attributes(value)

    def _add_all(self, *values: Any) -> None:
        self._words.append(str(len(values)))
        for value in values:
            self.add(value)

    def _add_dict(self, items: Mapping[Any, Any]) -> None:
        self._watch.add(items)
        self._add_all(*items, *items.values())

    def _add_tensor(self, tensor: Tensor) -> None:
        if is_split(tensor):
            whole: Any = tensor
            ranks = _ranks_of(whole.device_mesh)
            self._words.append(f"{whole.placements} of {tuple(whole.shape)} on ranks {ranks}")
            tensor = local(tensor)
        if _type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
            raise Undescribed(f"a tensor of {type(tensor).__name__}, {tensor.layout}")
        form = _form(tensor)
        self._watch.add_tensor(tensor, form)
        storage = tensor.untyped_storage()._cdata
        offset = int(tensor.storage_offset())
        number, first = self._storages.setdefault(storage, (len(self._storages), offset))
        self._words.append(
            f"{form} {number} {offset - first} {tensor.is_inference()} {tensor.is_conj()} "
            f"{tensor.is_neg()}"
        )

    def _add_function(self, function: FunctionType) -> None:
        self._words.append(f"{function.__module__}.{function.__qualname__}")
        self._words.append(_code(function.__code__))
        self.add(function.__defaults__)
        if function.__kwdefaults__:
            self._add_dict(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            self._add_attribute(cell, "cell_contents")

    def _add_attributes(self, value: Any) -> None:
        held = getattr(value, "__dict__", None)
        slots = _slots_of(type(value))
        if held is None and not slots:
            raise Undescribed(f"an object of {_name(type(value))}")
        left_out = _UNREAD if isinstance(value, nn.Module) else ()
        attributes = {} if held is None else held
        parameters = getattr(type(value), "__dataclass_params__", None)
        if attributes and not (parameters is not None and parameters.frozen):
            self._watch.add(attributes)
        for name, attribute in attributes.items():
            if name not in left_out:
                self._words.append(name)
                self.add(attribute)
        for name in slots:
            self._add_attribute(value, name)
        # a forward of ``patch`` does not call the class's forward, which transformers decorates
        # again for each layer of FP8 experts
        is_replaced = "forward" in attributes and attributes.get(REPLACED, self) is None
        hidden = ("forward",) if is_replaced else ()
        for kind in type(value).__mro__:
            self._add_class(kind, hidden)

    def _add_attribute(self, owner: Any, name: str) -> None:
        self._words.append(name)
        self._watch.add_attribute(owner, name)
        self.add(_attribute(owner, name))

    def _add_class(self, kind: type, hidden: tuple[str, ...]) -> None:
        """Describe methods and constants of a class, which a program can assign, but not those that
        the object hides. Leave out classes of torch and of Python, whose versions ``environment``
        contains."""
        if (kind, hidden) in self._kinds or belongs_to(kind.__module__, "torch"):
            return
        self._kinds.add((kind, hidden))
        if belongs_to(kind.__module__, "transformers", "dsv4_ops"):
            self._words.append(outline(kind, hidden))
            self._watch.add(vars(kind))
        else:
            self.add_names(kind, (*_UNREAD_NAMES, *hidden))

    def add_names(self, owner: type | ModuleType, left_out: Sequence[str]) -> None:
        """Describe the names in a class or in a module."""
        if isinstance(owner, type):
            _slots_of(owner)
            if issubclass(owner, nn.Module):
                left_out = (*left_out, *_UNREAD_OF_MODULES)
        held = vars(owner)
        self._watch.add(held)
        for name in sorted(set(held).difference(left_out)):
            self._words.append(name)
            self.add(held[name])

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self._words).encode()).hexdigest()[:32]


_slots_of: Callable[[type], list[str]]
_slots_of = copyreg._slotnames  # type: ignore[attr-defined]  # exists since Python 2
"""Return the names of the slots of a class and its bases. The call also stores these names in the
class. Otherwise, a later copy or pickle of an object would store them, and ``Watch`` would see a
change of the class."""


_OUTLINES: weakref.WeakKeyDictionary[type | ModuleType, dict[Any, tuple[Watch, str]]]
_OUTLINES = weakref.WeakKeyDictionary()


def outline(owner: type | ModuleType, left_out: tuple[str, ...] = ()) -> str:
    """Return a digest of the code and the constants of a class or a module, without the names in
    ``left_out``. For a module, also digest its classes and its source file. For modules of torch
    and Python, digest only the file.

    The contents of lists and dictionaries are left out, because programs change these contents
    while the code stays the same. ``_OUTLINES`` keeps the digests, because layers share classes.
    """
    outlines = _OUTLINES.setdefault(owner, {})
    watch, digest = outlines.get(left_out, (None, ""))
    if watch is None or not watch.unchanged():
        watch, owners = Watch(), [owner]
        walk = _Walk(watch, is_deep=False)
        if isinstance(owner, ModuleType):
            file, kinds = getattr(owner, "__file__", None), list(vars(owner).values())
            walk.add(None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest())
            kinds = [k for k in kinds if isinstance(k, type) and k.__module__ == owner.__name__]
            owners = [] if belongs_to(owner.__name__, "torch") else [owner, *kinds]
        for each in owners:
            if isinstance(each, type):
                walk.add_names(each, (*_UNREAD_NAMES, *left_out))
            else:
                walk.add_names(each, [name for name in vars(each) if name.startswith("__")])
        digest = walk.digest()
        outlines[left_out] = watch, digest
    return digest


def _word(value: Any) -> str | None:
    """Describe a value without parts; return None for other values."""
    if value is None or type(value) is bool:
        return str(value)
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, _PLAIN):
        return f"{_name(type(value))} {value!r}"
    if isinstance(value, type):
        return f"class {_name(value)}"
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, torch._ops.OpOverload):
        return f"op {value}"
    if isinstance(value, (BuiltinFunctionType, MemberDescriptorType, GetSetDescriptorType)):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    return None


def belongs_to(module: str, *packages: str) -> bool:
    """Whether a module is part of Python or of one of the packages."""
    top = module.partition(".")[0]
    return top in packages or top in sys.stdlib_module_names


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _code(code: CodeType) -> str:
    constants = list(map(_constant, code.co_consts))
    parts = (code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    # the order of a set depends on the process
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def state(device: torch.device) -> tuple[Any, ...]:
    """Return the process's settings that a trace reads, as Dynamo's global state guard does."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        torch.get_num_threads() if device.type == "cpu" else None,
        _gpu(device) if device.type == "cuda" else None,
    )


@functools.cache
def _gpu(device: torch.device) -> tuple[Any, ...]:
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def environment(settings: Mapping[str, Any]) -> str:
    """Return a digest of this package, other software, the device and the compilers' settings.

    Raises:
        Undescribed: the backend is not Inductor, or a setting is not supported.
    """
    options = settings.get("options") or {}
    if settings.get("backend", "inductor") != "inductor" or "mode" in settings:
        raise Undescribed("a backend other than inductor, or a mode of torch.compile")
    if not (settings["fullgraph"] is True and isinstance(settings["dynamic"], bool)):
        raise Undescribed("several graphs, or sizes that become symbols after a change")
    if not all(isinstance(value, (str, int, float, NoneType)) for value in options.values()):
        raise Undescribed("an option that is a function")
    from dsv4_ops.lowering import _compat

    found = [repr(sorted(options.items())), str(settings["dynamic"]), *versions(), *_libraries()]
    # leave out the tags of our own libraries: a trace adds these tags
    found += [tag for tag in compiler_config.cache_key_tag.split(";") if "dsv4_ops" not in tag]
    found.append(repr([aot_settings(), _compat.config.save_config_portable()]))
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:32]


def versions() -> list[str]:
    """Return a digest of this package's sources, the versions of other software, and the device."""
    import transformers

    triton = importlib.util.find_spec("triton") and importlib.import_module("triton").__version__
    found = [torch.__version__, transformers.__version__, str(triton)]
    found += [sys.version, platform.machine()]
    found += [str(torch.version.cuda), str(torch.version.hip)]
    found += [torch.backends.cpu.get_cpu_capability(), source_hash("")]
    if torch.cuda.is_available():
        found += [torch.cuda.get_device_name(), str(torch.cuda.get_device_capability())]
    return found


def _libraries() -> list[str]:
    return [name for name in libraries.LIBRARIES if libraries.find_name(name) != "none"]


@dataclass(frozen=True)
class Part:
    """A compiled part.

    Attributes:
        run: The code, without guards.
        sizes: Assumptions of the code about the sizes of its arguments.
    """

    run: Callable[..., Any]
    sizes: SizeGuards

    def takes(self, function: Any, args: tuple[Any, ...], rest: dict[str, Any]) -> bool:
        """Whether the part is valid for the sizes of these arguments."""
        return self.sizes.hold({"function": function, "args": args, "rest": rest})


def compiled(
    function: Callable[..., Any], args: tuple[Any, ...], settings: Mapping[str, Any]
) -> tuple[Part, bytes] | None:
    """Compile a function for these arguments; return the part, and the bytes for ``loaded``.

    Returns:
        None if torch cannot save compiled functions at all, or cannot save this function.
    """
    from dsv4_ops.lowering.workers import kernels_in_workers

    read: list[str] = []

    def drop(guards: Any) -> list[bool]:
        ends = tuple(end for name in _UNREAD for end in (f".{name}", f"['{name}']"))
        read.extend(guard.name for guard in guards if guard.name.endswith(ends))
        return [False] * len(guards)

    options = {**(settings.get("options") or {}), "guard_filter_fn": drop}
    try:
        with (
            allows_aot_compile(),
            without_collections(),
            kernels_in_workers(),
            sources_noted_once(),
            noted_trace() as guards,
        ):
            jitted: Any = torch.compile(function, **{**settings, "options": options})
            made = jitted.aot_compile((args, {}))
            sizes = guards() if settings["dynamic"] else SizeGuards("True", {})
        if read:
            raise Undescribed(read[0])
        with tempfile.TemporaryDirectory() as folder, without_kernel_table():
            path = Path(folder) / "part"
            made.save_compiled_function(str(path))
            content = path.read_bytes()
        sources = {source.module for source in made.source_info().inlined_sources}
        sources -= {function.__module__}  # ``environment`` covers it, and Dynamo adds names to it
        header = {
            "sources": {name: outline(importlib.import_module(name)) for name in sorted(sources)},
            "modules": sorted(name for name in sys.modules if name.startswith(_WITH_OPS)),
            "libraries": _libraries() if libraries.load.cache_info().currsize else [],
            "sizes": asdict(sizes),
        }
        made.disable_guard_check()
    except Exception as error:
        # torch's errors have no common class; if the function itself raised, Dynamo will raise the
        # same error later
        _log.info("%s is not kept: %s", function.__name__, error)
        return None
    kept = json.dumps(header).encode() + b"\n" + content
    return Part(made, sizes), hashlib.sha256(kept).digest() + kept


@contextmanager
def without_collections() -> Iterator[None]:
    """Turn the garbage collector off: a compile or a first load makes a million objects, few of
    which are garbage, and the collector would take a tenth of the total time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def loaded(kept: bytes, names: Mapping[str, Any], place: str = "a part") -> Part | None:
    """Load a part from the bytes that ``compiled`` returned; ``place`` is the origin of the bytes,
    for logs. Return None if the bytes are damaged, or if sources, versions or libraries differ."""
    try:
        digest, kept = kept[:32], kept[32:]
        if hashlib.sha256(kept).digest() != digest:
            raise ValueError("damaged")
        line, _, content = kept.partition(b"\n")
        header = json.loads(line)
        for name in header["modules"]:  # these modules register the ops that the part calls
            importlib.import_module(name)
        for name, digest in header["sources"].items():
            if outline(importlib.import_module(name)) != digest:
                raise ImportError(f"another {name}")
        for name in header["libraries"]:
            libraries.load(name)
        made: Any = torch.compiler.load_compiled_function(
            io.BytesIO(content), f_globals=dict(names)
        )
        made.disable_guard_check()
        return Part(made, SizeGuards(**header["sizes"]))
    except Exception as error:  # other versions and libraries can raise any class of error
        _log.info("%s is not loaded: %s", place, error)
        return None


class PartsFile:
    """A file of compiled parts, and of entries of torch's caches. A compile of other parts reads
    these entries.

    Args:
        path: The file.
        settings: Settings of ``torch.compile``.

    Attributes:
        caches: Bytes for ``torch.compiler.load_cache_artifacts``, or None.
        has_more: Whether ``keep`` added a part that is not in the file yet.
        takes_parts: Whether parts compiled with these settings can be saved.
    """

    _CACHES = "caches"

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._parts: dict[str, bytes] = {}
        self.caches: bytes | None = None
        self.has_more, self.takes_parts = False, True
        try:
            self._prefix = f"{environment(settings)}/"
        except Undescribed as error:
            _log.info("no part is kept: %s", error)
            self.takes_parts, self._prefix = False, "none/"
        self._binaries = f"{self._prefix}binaries/{kernel_files.processor()}/"
        kernel_files.agree_with_workers()
        if path.is_file():
            self._read()

    def __str__(self) -> str:
        return str(self._path)

    def _read(self) -> None:
        try:
            with zipfile.ZipFile(self._path) as file:
                kept = (self._CACHES, self._prefix)
                found = {n: file.read(n) for n in file.namelist() if n.startswith(kept)}
        except Exception as error:  # damage can raise any class of error
            _log.warning("%s is damaged, and a new file replaces it: %s", self._path, error)
            return
        self.caches, self._parts = found.pop(self._CACHES, None), found
        binaries = [name for name in found if name.startswith(self._binaries)]
        kernel_files.put({name.removeprefix(self._binaries): found[name] for name in binaries})

    def is_empty(self) -> bool:
        """Whether the file has no part for this process."""
        return not any(name.startswith(self._prefix) for name in self._parts)

    def find(self, name: str) -> bytes | None:
        """Return the part that ``keep`` stored under this name, or None."""
        return self._parts.get(self._prefix + name)

    def place(self, name: str) -> str:
        """Return a text that names a part and the file."""
        return f"{self._prefix}{name} in {self._path}"

    def keep(self, name: str, part: bytes) -> None:
        """Store a part, which ``write`` then writes to the file."""
        self._parts[self._prefix + name] = part
        self.has_more = True

    def write(self, caches: bytes | None) -> None:
        """Replace the file as a whole, so that readers see the old file or the new file."""
        self.has_more = False
        with kernel_files.replacing(self._path, logging.WARNING) as partial:
            if self.takes_parts:
                binaries = kernel_files.collect()
                self._parts |= {self._binaries + name: binaries[name] for name in binaries}
            with zipfile.ZipFile(partial, "w") as file:
                if caches is not None:
                    file.writestr(self._CACHES, caches)
                for name, part in self._parts.items():
                    file.writestr(name, part)


class PartsFolder:
    """A folder of compiled parts that all processes of a user share, one file per part.

    The kernels that Inductor and Triton compiled stay in torch's own folders.

    Args:
        folder: The folder.
        settings: Settings of ``torch.compile``.

    Raises:
        Undescribed: parts compiled with these settings cannot be saved.
    """

    caches: bytes | None = None
    takes_parts = True

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._home = folder
        self._folder = folder / environment(settings) / kernel_files.processor()
        kernel_files.agree_with_workers()

    def __str__(self) -> str:
        return str(self._home)

    def _path(self, name: str) -> Path:
        return self._folder / name.replace("/", "-")

    def is_empty(self) -> bool:
        """Whether the folder has no part for this process."""
        return not self._folder.is_dir()

    def find(self, name: str) -> bytes | None:
        """Return the part that a process stored under this name, or None."""
        try:
            return self._path(name).read_bytes()
        except OSError:
            return None

    def place(self, name: str) -> str:
        """Return the file of a part."""
        return str(self._path(name))

    def keep(self, name: str, part: bytes) -> None:
        """Store a part, so that other processes see the whole part or no part."""
        path = self._path(name)
        with kernel_files.replacing(path, logging.INFO) as partial:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial.write_bytes(part)


def folder_of_parts() -> Path | None:
    """Return the folder that the environment variable ``DSV4_OPS_CACHE`` names.

    If the variable is not set, return the folder ``dsv4_ops`` in the user's cache folder.

    Returns:
        None if the variable is "off" or names a file, if the folder in the user's cache folder
        cannot be made, or if another user owns it or can write to it. A part from another user
        could run any code.
    """
    setting = os.environ.get("DSV4_OPS_CACHE", "")
    if setting and Path(setting).is_file():
        _log.warning("no part is kept: DSV4_OPS_CACHE is a file, %s, not a folder", setting)
        return None
    if setting:
        return None if setting == "off" else Path(setting)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / "dsv4_ops"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        _log.info("no part is kept: %s", error)
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        _log.warning("no part is kept: others own %s, or can write to it", folder)
        return None
    return folder
