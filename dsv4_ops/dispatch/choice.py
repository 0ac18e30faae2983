"""Which implementation a call runs: the one that ``impl=`` names, or the fastest here.

An explicit ``impl`` runs or raises; it never becomes another. ``impl="auto"`` takes our kernels,
unless an installed library was faster on an H200 at these sizes (``is_faster``). With dynamic
shapes it takes our kernels: asking a symbol would guard it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.compiler.config as compiler_config

from dsv4_ops.core.ints import known
from dsv4_ops.core.layout import IndexerLayout, MainLayout
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import AUTO, REFERENCE, TRITON, OpSpec
from dsv4_ops.core.tiles import is_of_ours
from dsv4_ops.core.torch_compat import guard_or_false
from dsv4_ops.dispatch import libraries
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES
from dsv4_ops.dispatch.prefill import MOST_GATHERED, workspace_rows
from dsv4_ops.dispatch.probes import probe

Values = Mapping[str, Any]
"""Arguments of a call by name."""

_TAG = "dsv4_ops_libraries="
"""What the part of Inductor's cache keys begins with that names the libraries."""

FLASH_ATTN = "flash_attn"
"""The flash attention that torch brings."""

IMPLS = (AUTO, TRITON, FLASH_MLA, DEEP_GEMM, REFERENCE)

_NAMES = {FLASH_MLA: "FlashMLA", DEEP_GEMM: "DeepGEMM", FLASH_ATTN: "Flash attention"}

DEVICES = ("cuda",)
"""Types of the devices that kernels and libraries run on."""

FLASH_MLA_HEADS = (64, 128)
FLASH_MLA_TOKENS = 8192
"""Most tokens of a decode: its planner keeps a few numbers of each in shared memory."""
FLASH_ATTN_WIDTH = 256
DEEP_GEMM_HEADS, DEEP_GEMM_BLOCK = (32, 64), 64


MEASURED_BY = "python -m benchmarks.choice, 2026-11-22"
"""Where ``DEEP_GEMM_FASTER`` comes from: torch 2.11.0+cu130, the FlashMLA and DeepGEMM of vLLM
0.22.1, CUDA graphs over rotating inputs whose L2 was not emptied."""

DEEP_GEMM_FASTER: dict[str, Any] = {
    "op": "indexer_logits",
    "library": DEEP_GEMM,
    "heads": 64,
    "tokens": 32,
    "columns": 2048,
    "work": (2**20, 2**23),
    "measured": (36.7, 32.2),
}
"""Where a library was faster than our kernels: the least tokens and columns, the least and most of
their product (DeepGEMM stores float32 logits, here up to 32 MiB), and microseconds of ours and of
the library at the least sizes."""


def is_faster(op: str, library: str, values: Values) -> bool:
    """Whether ``library`` was faster than our kernels on an H200 for such a call."""
    rule = DEEP_GEMM_FASTER
    if (op, library) != (rule["op"], rule["library"]):
        return False
    (tokens, heads, _), columns = values["q"].shape, values["num_rows"]
    least, most = rule["work"]
    return bool(
        heads == rule["heads"]
        and tokens >= rule["tokens"]
        and columns >= rule["columns"]
        and least <= tokens * columns <= most
    )


class Choice(NamedTuple):
    """What an op runs with, and why; see ``dsv4_ops.dispatch.providers.choice_of``."""

    impl: str
    reason: str


class Limit(NamedTuple):
    """What a library does not take: ``what`` the call has, and what it would take."""

    what: str
    advice: str


def check_impl(
    op: str, providers: Sequence[str], impl: str, device: torch.device, values: Values
) -> None:
    """``impl`` is one of the op's, and takes such a call on such a device; whether the library is
    there is asked when the op runs or is compiled."""
    allowed = (AUTO, *providers)
    if not isinstance(impl, str):
        raise refusal(
            TypeError, op, "impl", "be a str", type(impl).__name__, f"Pass {_either(allowed)}"
        )
    if impl not in allowed:
        raise refusal(
            ValueError, op, "impl", f"be {_either(allowed)}", repr(impl), "Pass one of these"
        )
    check_device(op, impl, device)
    check_limit(op, providers, impl, values)


def check_limit(op: str, providers: Sequence[str], impl: str, values: Values) -> None:
    """What was asked for takes such a call, whoever asked: the op checks it again where it runs, as
    the sizes of an exported program are not known before."""
    limited = impl in LIBRARIES or impl == FLASH_ATTN
    found = limit(op, impl, values, asking=True) if limited else None
    if found is not None:
        others = [each for each in (AUTO, *providers) if each != impl]
        rule = f"be {_either(others)} {found.what}"
        raise refusal(NotImplementedError, op, "impl", rule, repr(impl), found.advice)


def impl_for(providers: Sequence[str], impl: str) -> str:
    """What an op runs with where ``impl`` is meant for several ops: the others decide
    themselves."""
    return impl if impl in providers else AUTO


def check_device(op: str, impl: str, device: torch.device) -> None:
    """What was asked for runs on such devices."""
    if impl not in (AUTO, REFERENCE) and device.type not in DEVICES:
        rule = f"be {_either((AUTO, REFERENCE))} on {device.type}"
        advice = "Move the tensors to a CUDA device"
        raise refusal(RuntimeError, op, "impl", rule, repr(impl), advice)


def limit(op: str, library: str, values: Values, *, asking: bool = False) -> Limit | None:
    """What ``library`` does not take of a call of ``op``; sizes that are symbols are within its
    limits, unless ``asking``."""
    if library == FLASH_ATTN:
        return _flash_attn_limit(values)
    if library == FLASH_MLA:
        return _flash_mla_limit(op, values, asking)
    return _deep_gemm_limit(values)


def _above(size: Any, most: int, asking: bool) -> bool:
    """Whether a size is above ``most``. Asking a symbol is a guard of the graph; exported programs
    have none."""
    if isinstance(size, int):
        return size > most
    if not asking or torch.compiler.is_exporting():
        return False
    return guard_or_false(size > most)


def _flash_mla_limit(op: str, values: Values, asking: bool) -> Limit | None:
    q = values["q"]
    heads, width, tokens = int(q.shape[1]), int(q.shape[2]), q.shape[0]
    if op == "sparse_mla_gathered":
        if q.dtype != torch.bfloat16 or width != MainLayout.head_dim:
            return Limit(
                f"with {q.dtype} rows of {width} values", "FlashMLA takes bfloat16 rows of 512"
            )
    elif values["layout"] != MainLayout.tag:
        return Limit(f"with layout {values['layout']!r}", "FlashMLA reads the layout 'v4_fp8'")
    elif op == "sparse_mla_prefill":
        rows = workspace_rows(values)
        if _above(rows, MOST_GATHERED, asking):
            what = f"with block tables of {known(rows)} rows"
            return Limit(what, f"FlashMLA has room for {MOST_GATHERED} rows of all requests")
    elif values["num_splits"] != 0 or values["batch_invariant"]:
        return Limit("with num_splits or batch_invariant", "FlashMLA decides itself what it splits")
    elif _above(tokens, FLASH_MLA_TOKENS, asking):
        return Limit(f"with {known(tokens)} tokens", f"FlashMLA decodes up to {FLASH_MLA_TOKENS}")
    if heads not in FLASH_MLA_HEADS:
        return Limit(f"with {heads} heads", "FlashMLA takes 64 or 128")
    return None


def _deep_gemm_limit(values: Values) -> Limit | None:
    heads, size = int(values["q"].shape[1]), values["block_size"]
    if values["layout"] != IndexerLayout.tag:
        return Limit(
            f"with layout {values['layout']!r}", "DeepGEMM reads the layout 'v4_indexer_fp8'"
        )
    if heads not in DEEP_GEMM_HEADS:
        return Limit(f"with {heads} heads", "DeepGEMM takes 32 or 64")
    if size != DEEP_GEMM_BLOCK:
        return Limit(f"with block_size {size}", f"DeepGEMM reads pages of {DEEP_GEMM_BLOCK} rows")
    return None


def _flash_attn_limit(values: Values) -> Limit | None:
    q, width, value = values["q"], int(values["q"].shape[2]), int(values["v"].shape[2])
    if q.dtype == torch.float32:
        return Limit("with torch.float32", "Flash attention takes bfloat16 or float16")
    if width > FLASH_ATTN_WIDTH or width % 8 != 0 or value > width:
        what = f"with keys of {width} and values of {value} columns"
        most = f"a multiple of 8 of them, at most {FLASH_ATTN_WIDTH}, and no more for values"
        return Limit(what, f"Flash attention takes {most}")
    return None


def choose(spec: OpSpec, values: Values) -> Choice:
    """What a call runs with.

    Raises:
        ImportError, RuntimeError: a library was asked for that cannot be loaded, or does not run
            here.
        NotImplementedError: one that does not take the call.
    """
    impl, device = values["impl"], values["q"].device
    check_device(spec.name, impl, device)
    if impl in LIBRARIES or impl == FLASH_ATTN:
        check_limit(spec.name, spec.providers, impl, values)
        require(spec.name, impl)
        return Choice(impl, "asked for")
    if impl != AUTO:
        return Choice(impl, "asked for")
    if device.type not in DEVICES:
        return Choice(REFERENCE, f"no kernel runs on {device.type}")
    if FLASH_ATTN in spec.providers:
        why = _flash_attn_obstacle(values)
        return Choice(ours(spec), why) if why else Choice(FLASH_ATTN, "bfloat16 on Hopper")
    why = "no library runs this op"
    for library in spec.providers:
        if library in LIBRARIES:
            why = obstacle(spec.name, library, values)
            if not why:
                return Choice(library, "faster at these sizes on an H200")
    return Choice(ours(spec), why)


def takes_no_library(values: Values) -> bool:
    """Whether the call has a plan of ``sparse_mla_plan``, which nothing but our kernel goes by."""
    return is_of_ours(values.get("plan"))


def ours(spec: OpSpec) -> str:
    """What runs an op on a GPU without any library."""
    return TRITON if TRITON in spec.providers else REFERENCE


def given_to(impl: str, values: Values) -> dict[str, Any]:
    """``values`` without a plan that is FlashMLA's, unless ``impl`` is."""
    plan = values.get("plan")
    of_library = plan is not None and not is_of_ours(plan) and impl != FLASH_MLA
    return {**values, "plan": None} if of_library else dict(values)


def obstacle(op: str, library: str, values: Values) -> str:
    """Why ``impl="auto"`` does not take ``library``; empty if it does."""
    if takes_no_library(values):
        return "the plan is ours"
    if not _is_sized(values):
        return "sizes are symbols, and asking them would fix them"
    found = limit(op, library, values)
    if found is not None:
        return f"{found.advice}: the call is {found.what}"
    if not is_faster(op, library, values):
        return f"{library} was not faster at these sizes on an H200"
    return unusable(library) or _other_device(values["q"].device)


def _flash_attn_obstacle(values: Values) -> str:
    """Why ``impl="auto"`` does not take torch's flash attention; of sizes it depends on none."""
    found, q = _flash_attn_limit(values), values["q"]
    if found is not None:
        return f"{found.advice}: the call is {found.what}"
    if q.dtype != torch.bfloat16:
        return f"the call is in {q.dtype}"
    return unusable(FLASH_ATTN) or _other_device(q.device)


def _is_sized(values: Values) -> bool:
    """Whether the sizes that decide are no symbols."""
    return all(isinstance(size, int) for size in (values["q"].shape[0], values.get("num_rows", 0)))


def _other_device(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    return "" if capability == (9, 0) else "nothing was measured on this GPU"


@functools.cache
def unusable(library: str) -> str:
    """Why ``library`` cannot run here; empty if it can. Loads it."""
    if library == FLASH_ATTN:
        built = torch.backends.cuda.is_flash_attention_available()
        return "" if built else "this torch was built without it"
    found = probe(library, load=True)
    return "" if found.usable else found.reason


def require(op: str, library: str) -> None:
    """``library`` runs here, and is loaded."""
    reason = unusable(library)
    if not reason:
        return
    found = reason if library == FLASH_ATTN else libraries.find(library)
    kind = ImportError if isinstance(found, str) or "import failed" in reason else RuntimeError
    advice = f"{_NAMES[library]}: {reason.rstrip('.')}"
    raise refusal(kind, op, "impl", "be one that runs here", repr(library), advice)


def no_triton(op: str) -> ImportError:
    """The error of ``impl="triton"`` without triton."""
    return refusal(ImportError, op, "impl", "be one that runs here", repr(TRITON), "Install triton")


def not_ours(op: str, impl: str, what: str) -> None:
    """Raise if our kernel was asked for: it does not take the call, and the reference would."""
    if impl == TRITON:
        rule = f"be {_either((AUTO, REFERENCE))} {what}"
        advice = "Our kernels do not take them, and the reference was not asked for"
        raise refusal(NotImplementedError, op, "impl", rule, repr(impl), advice)


def prepare(spec: OpSpec, values: Values) -> list[str]:
    """What must be known before compiled code is looked up in a cache: code that calls a library
    was made by a trace that loaded it, and the process that finds it in a cache has not. Libraries
    that such code may call, which are loaded.

    The fake of an op is the first to see a call that is compiled.
    """
    if torch.compiler.is_exporting() or values["q"].device.type not in DEVICES:
        return []
    impl = choose(spec, values).impl
    called = [impl] if impl in LIBRARIES else []
    sized = _is_sized(values)
    for library in spec.providers:  # max_autotune, which is not known yet, may choose any of them
        open_to_all = sized and values["impl"] == AUTO and library in LIBRARIES
        if open_to_all and limit(spec.name, library, values) is None and not unusable(library):
            called.append(library)
    found = {name: libraries.find_name(name) for name in LIBRARIES}
    state = ",".join(f"{name}:{place}" for name, place in found.items() if place != "none")
    present = compiler_config.cache_key_tag.split(";")
    kept = [each for each in present if each and not each.startswith(_TAG)]
    # no tag without a library: it would part caches for nothing
    wanted = [*kept, _TAG + state] if state else kept
    if present != wanted:
        compiler_config.cache_key_tag = ";".join(wanted)
    return called


def _either(words: Sequence[str]) -> str:
    quoted = [repr(word) for word in words]
    if len(quoted) == 1:
        return quoted[0]
    return ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
