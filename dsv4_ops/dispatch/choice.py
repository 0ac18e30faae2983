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
from torch import Tensor

from dsv4_ops.core.ints import known
from dsv4_ops.core.layout import IndexerLayout, MainLayout, PlainLayout
from dsv4_ops.core.refusal import refusal
from dsv4_ops.core.registry import AUTO, REFERENCE, TRITON, OpSpec
from dsv4_ops.core.tiles import is_of_ours
from dsv4_ops.core.torch_compat import guard_or_false
from dsv4_ops.dispatch import libraries
from dsv4_ops.dispatch.libraries import DEEP_GEMM, FLASH_MLA, LIBRARIES, SCALED_MM
from dsv4_ops.dispatch.prefill import MOST_GATHERED, workspace_rows
from dsv4_ops.dispatch.probes import probe

Values = Mapping[str, Any]
"""Arguments of a call by name."""

_TAG = "dsv4_ops_libraries="
"""What the part of Inductor's cache keys begins with that names the libraries."""

IMPLS = (AUTO, TRITON, FLASH_MLA, DEEP_GEMM, REFERENCE)

_NAMES = {FLASH_MLA: "FlashMLA", DEEP_GEMM: "DeepGEMM"}

DEVICES = ("cuda",)
"""Types of the devices that kernels and libraries run on."""

CODES_CAPABILITY = (8, 9)
"""Lowest compute capability for which Triton converts e4m3 codes."""

FLASH_MLA_HEADS = (64, 128)
FLASH_MLA_TOKENS = 8192
"""Most tokens of a decode: its planner keeps a few numbers of each in shared memory."""
FLASH_MLA_DENSE_SIZES, FLASH_MLA_DENSE_BLOCK = (576, 512), 64
"""Width and latent values of its dense decode's rows, and rows of a block."""
FLASH_MLA_DENSE_DTYPES = (torch.bfloat16, torch.float16)
SCALED_MM_TOKENS = {"fp8_linear": 128}
"""Tokens from which on ``impl="auto"`` takes torch's block-wise product of activations in FP8. Not
of groups, each of which is a call: 196 us where our kernel takes 81 (1024 tokens of ``o_a``, codes
given, eager)."""

SCALED_MM_FROM = {
    op: f"{least} tokens with activations in FP8, if their number is no symbol"
    for op, least in SCALED_MM_TOKENS.items()
}
"""The same in words."""
SCALED_MM_COLUMNS = 512
"""Rows of four scales: versions of torch differ in how shorter ones are padded."""
DEEP_GEMM_HEADS, DEEP_GEMM_BLOCK = (32, 64), 64
LEAST_LATENT = 16
"""Least values of a latent that our dense decode takes, whose matrix products have no less."""
MOST_COLUMNS = 128
"""Columns of keys without RoPE, of those with it, or of values, that a tile of our dense prefill
holds."""


FASTER_LIBRARY = ("indexer_logits", DEEP_GEMM)
"""The op and the library that ``impl="auto"`` takes, within the sizes of ``is_faster``."""

MEASURED = (
    "64 heads, from 32 tokens and 2048 columns on, 2^20 to 2^23 logits "
    "(32.2 us at 32 x 32768 where ours takes 36.7)"
)
"""Those sizes in words. Measured on an H200 by ``python -m benchmarks.choice`` on 2026-11-22 with
torch 2.11.0+cu130 and vLLM 0.22.1's DeepGEMM, in CUDA graphs over rotating inputs."""


def is_faster(op: str, library: str, values: Values) -> bool:
    """Whether ``library`` was faster than our kernels on an H200 for such a call."""
    if (op, library) != FASTER_LIBRARY:
        return False
    (tokens, heads, _), columns = values["q"].shape, values["num_rows"]
    large_enough = tokens >= 32 and columns >= 2048
    return bool(heads == 64 and large_enough and 2**20 <= tokens * columns <= 2**23)


def subject(values: Values) -> Tensor:
    """The tensor whose device and rows decide: queries, or what a layer multiplies."""
    found: Tensor = values["q"] if "q" in values else values["x"]
    return found


class Choice(NamedTuple):
    """What an op runs with, and why; see ``dsv4_ops.dispatch.providers.choice_of``."""

    impl: str
    reason: str


class Sizes(NamedTuple):
    """What limits ask of a tensor, where it does not exist yet."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


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
        found, advice = type(impl).__name__, f"Pass {_either(allowed)}"
        raise refusal(TypeError, op, "impl", "be a str", found, advice)
    if impl not in allowed:
        rule, advice = f"be {_either(allowed)}", "Pass one of these"
        raise refusal(ValueError, op, "impl", rule, repr(impl), advice)
    check_device(op, impl, device)
    check_limit(op, providers, impl, values)


def check_limit(
    op: str, providers: Sequence[str], impl: str, values: Values, asked_by: str = ""
) -> None:
    """What was asked for takes such a call, whoever asked: the op checks it again where it runs, as
    the sizes of an exported program are not known before, and layers, ``asked_by``, before anything
    is written. ``Sizes`` can stand in for tensors."""
    found = limit(op, impl, values, asking=True)
    if found is not None:
        others = [each for each in (AUTO, *providers) if each != impl]
        rule = f"be {_either(others)} {found.what}"
        caller = asked_by or op
        raise refusal(NotImplementedError, caller, "impl", rule, repr(impl), found.advice)


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


def check_codes(op: str, device: torch.device) -> None:
    """Kernels of caches that hold e4m3 codes are compiled for such devices."""
    if device.type == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(device)
        if found < CODES_CAPABILITY:
            least, has = (".".join(map(str, each)) for each in (CODES_CAPABILITY, found))
            rule = f"have compute capability {least} or later for caches of FP8 keys"
            advice = "Pass kv='bf16' to patch"
            raise refusal(RuntimeError, op, "device", rule, has, advice)


def limit(op: str, library: str, values: Values, *, asking: bool = False) -> Limit | None:
    """What ``library``, or "triton", does not take of a call of ``op``; sizes that are symbols are
    within its limits, unless ``asking``."""
    if library == FLASH_MLA:
        return _flash_mla_limit(op, values, asking)
    if library == SCALED_MM:
        return _scaled_mm_limit(values)
    if library == DEEP_GEMM:
        return _deep_gemm_limit(values)
    ours = {"mla_decode": _dense_decode_limit, "mla_prefill": _dense_prefill_limit}
    return ours[op](values) if library == TRITON and op in ours else None


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
    if op == "mla_decode":
        return _flash_mla_dense_limit(values, asking)
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
            return Limit(what, f"FlashMLA takes up to {MOST_GATHERED} rows of all requests")
    elif values["num_splits"] != 0 or values["batch_invariant"]:
        return Limit("with num_splits or batch_invariant", "FlashMLA decides itself what it splits")
    elif _above(tokens, FLASH_MLA_TOKENS, asking):
        return Limit(f"with {known(tokens)} tokens", f"FlashMLA decodes up to {FLASH_MLA_TOKENS}")
    if heads not in FLASH_MLA_HEADS:
        return Limit(f"with {heads} heads", "FlashMLA takes 64 or 128")
    return None


def _flash_mla_dense_limit(values: Values, asking: bool) -> Limit | None:
    q, block_size = values["q"], values["block_size"]
    heads, tokens = int(q.shape[1]), q.shape[0]
    sizes = (int(q.shape[2]), values["kv_lora_rank"])
    if values["layout"] != "plain" or q.dtype not in FLASH_MLA_DENSE_DTYPES:
        what = f"with layout {values['layout']!r} and {q.dtype} queries"
        return Limit(what, "FlashMLA takes plain bfloat16 or float16 rows")
    if sizes != FLASH_MLA_DENSE_SIZES:
        what = f"with rows of {sizes[0]} values, of which {sizes[1]} are the latent"
        return Limit(what, "FlashMLA takes rows of 576, of which 512 are the latent")
    if block_size != FLASH_MLA_DENSE_BLOCK:
        return Limit(f"with block_size {block_size}", "FlashMLA reads pages of 64 rows")
    if values["plan"] is not None:
        return Limit("with a plan", "FlashMLA makes its own in the call")
    if values["num_splits"] != 0 or values["batch_invariant"]:
        return Limit("with num_splits or batch_invariant", "FlashMLA decides itself what it splits")
    if heads > FLASH_MLA_HEADS[-1]:
        return Limit(f"with {heads} heads", f"FlashMLA takes up to {FLASH_MLA_HEADS[-1]}")
    if _above(tokens, FLASH_MLA_TOKENS, asking):
        return Limit(f"with {known(tokens)} tokens", f"FlashMLA decodes up to {FLASH_MLA_TOKENS}")
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


def _scaled_mm_limit(values: Values) -> Limit | None:
    if values["x_scale"] is None and values["activations"] != "fp8":
        return Limit("with activations 'bf16'", "scaled_mm multiplies FP8 by FP8")
    if values["out_dtype"] != torch.bfloat16:
        return Limit(f"with out_dtype {values['out_dtype']}", "scaled_mm returns torch.bfloat16")
    columns = int(values["weight"].shape[1])
    if columns % SCALED_MM_COLUMNS != 0:
        advice = f"scaled_mm takes multiples of {SCALED_MM_COLUMNS}"
        return Limit(f"with in_features {columns}", advice)
    return None


def _dense_decode_limit(values: Values) -> Limit | None:
    q, cache, layout = values["q"], values.get("kv_cache"), values["layout"]
    rank, width = int(values["kv_lora_rank"]), int(q.shape[2])
    if rank < LEAST_LATENT or rank & (rank - 1) != 0 or width <= rank:
        what = f"with rows of {width} values, of which {rank} are the latent"
        least = f"a latent of a power of two from {LEAST_LATENT} on"
        return Limit(what, f"Our kernels take {least}, followed by rotated values")
    if layout != PlainLayout.tag and q.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        what = f"with layout {layout!r} and {q.dtype} queries"
        return Limit(what, "Our kernels read codes for bfloat16 queries, or for codes")
    if cache is not None and (cache.stride(2) != 1 or cache.stride(1) != cache.shape[2]):
        return Limit("with rows that lie apart", "Our kernels take blocks of dense rows")
    return None


def _dense_prefill_limit(values: Values) -> Limit | None:
    q, k_nope, v = (values[name] for name in ("q", "k_nope", "v"))
    widths = [int(each.shape[2]) for each in (q, k_nope, v)]
    if q.dtype == torch.float32:
        return Limit("with torch.float32", "Our kernel takes bfloat16 or float16")
    if max(widths[0] - widths[1], *widths[1:]) > MOST_COLUMNS:
        what = f"with keys of {widths[0]}, of which {widths[1]} are not rotated, and values of "
        what = f"{what}{widths[2]} columns"
        return Limit(what, f"Our kernel takes up to {MOST_COLUMNS} of each kind")
    return None


@functools.cache
def scaled_mm_obstacle() -> str:
    """Why torch's product with block scales does not run here; empty if it does."""
    if not hasattr(torch.ops.aten, "_scaled_mm_v2"):
        return "This torch has no _scaled_mm_v2"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "It needs a Hopper GPU, compute capability 9.0"
    return ""


def choose(spec: OpSpec, values: Values) -> Choice:
    """What a call runs with.

    Raises:
        ImportError, RuntimeError: a library was asked for that cannot be loaded, or does not run
            here.
        NotImplementedError: one that does not take the call.
    """
    impl, device = values["impl"], subject(values).device
    check_device(spec.name, impl, device)
    if impl != AUTO:
        check_limit(spec.name, spec.providers, impl, values)
        if impl in LIBRARIES:
            require(spec.name, impl)
        elif impl == SCALED_MM and (obstacle_here := scaled_mm_obstacle()):
            rule = "be one that runs here"
            raise refusal(RuntimeError, spec.name, "impl", rule, repr(impl), obstacle_here)
        return Choice(impl, "asked for")
    if device.type not in DEVICES:
        return Choice(REFERENCE, f"no kernel runs on {device.type}")
    if SCALED_MM in spec.providers and not _scaled_mm_faster_obstacle(spec.name, values):
        return Choice(SCALED_MM, f"faster from {SCALED_MM_TOKENS[spec.name]} tokens on")
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
    return unusable(library) or _other_device(subject(values).device)


def _scaled_mm_faster_obstacle(op: str, values: Values) -> str:
    """Why ``impl="auto"`` does not take torch's block-wise product; empty if it does."""
    if op not in SCALED_MM_TOKENS:
        return "our kernel multiplies all groups at once"
    num_tokens = values["x"].shape[0]
    if not isinstance(num_tokens, int) or num_tokens < SCALED_MM_TOKENS[op]:
        return "it was not faster for so few tokens"
    found = _scaled_mm_limit(values)
    return found.what if found is not None else scaled_mm_obstacle()


def _is_sized(values: Values) -> bool:
    """Whether the sizes that decide are no symbols."""
    return all(
        isinstance(size, int) for size in (subject(values).shape[0], values.get("num_rows", 0))
    )


def _other_device(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    return "" if capability == (9, 0) else "nothing was measured on this GPU"


@functools.cache
def unusable(library: str) -> str:
    """Why ``library`` cannot run here; empty if it can. Loads it."""
    found = probe(library, load=True)
    return "" if found.usable else found.reason


def require(op: str, library: str) -> None:
    """``library`` runs here, and is loaded."""
    reason = unusable(library)
    if not reason:
        return
    found = libraries.find(library)
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
    if torch.compiler.is_exporting() or subject(values).device.type not in DEVICES:
        return []
    impl = choose(spec, values).impl
    tag_libraries()
    return [impl] if impl in LIBRARIES else []


def tag_libraries() -> None:
    """Have the keys of torch's caches say which libraries there are."""
    found = {name: libraries.find_name(name) for name in LIBRARIES}
    state = ",".join(f"{name}:{place}" for name, place in found.items() if place != "none")
    present = compiler_config.cache_key_tag.split(";")
    kept = [each for each in present if each and not each.startswith(_TAG)]
    # no tag without a library: it would part caches for nothing
    wanted = [*kept, _TAG + state] if state else kept
    if present != wanted:
        compiler_config.cache_key_tag = ";".join(wanted)


def _either(words: Sequence[str]) -> str:
    quoted = [repr(word) for word in words]
    if len(quoted) == 1:
        return quoted[0]
    return ", ".join(quoted[:-1]) + f" or {quoted[-1]}"
