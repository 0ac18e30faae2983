"""AOTInductor packages of sparse MLA on Hopper, exported for any number of tokens: they hold the
binaries of its kernels in Gluon. ``test_layers.py`` runs packages where nothing of ours is
imported. Run there with ``pytest -m gpu tests``."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_ops.core.registry import OPS
from dsv4_ops.lowering.inspect import build_package, load_package
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.support import attention_batches as batches
from tests.support.attention_batches import DECODE, DEVICE, GATHERED, PAGED, PER_TOKEN, decode_case
from tests.support.mla_batches import DS_FP8, SPARSE, mla_case, sparse_case
from tests.support.prefill_batches import PREFILL, prefill_case

prefill = partial(prefill_case, heads=64, max_reqs=2)
gathered = partial(batches.adversarial_gathered, heads=64, topk=300)


def selected(layout: str, longest: int, seed: int, count: int) -> Case:
    case = mla_case(seed, [1, 2, count - 4], 128, longest=longest, layout=layout)
    return sparse_case(case, topk=longest + 4)


CALLS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], Callable[[int, int], Case]]] = {
    "decode": (DECODE, PER_TOKEN, (40, 3, 140), partial(decode_case, heads=64)),
    "paged": (PAGED, PER_TOKEN, (9, 64, 140), partial(batches.paged_case, heads=64)),
    "C4": (PREFILL, (0, 2, 3, 7), (90, 700, 256, 5, 40), partial(prefill, mode="C4")),
    "C128": (PREFILL, (0, 2, 3), (90, 2048, 600, 5, 40), partial(prefill, mode="C128")),
    "gathered": (GATHERED, (0, 2, 3), (5, 300, 140), gathered),
    "V3.2": (SPARSE, (0, 2, 3), (5, 40, 270), partial(selected, "plain", 600)),
    "V3.2, 656 bytes": (SPARSE, (0, 2, 3), (5, 40, 270), partial(selected, DS_FP8, 600)),
    "V3.2, unscheduled": (SPARSE, (0, 2, 3), (5, 40, 270), partial(selected, DS_FP8, 300)),
}  # fmt: skip
"""An op, its arguments with a row per token, numbers of tokens (the first is exported), and a call.
In C4 and C128, the second prefill copies its rows, and the last two prefills have splits."""


class Call(torch.nn.Module):
    """An op, whose results are returned as a tuple."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.settings = name, settings

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(OPS[self.name].op(*tensors, **self.settings))


def shifted(tensor: Tensor) -> Tensor:
    """Return an equal tensor that begins one element after the start of its storage."""
    room = tensor.new_empty(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("kind", CALLS)
def test_a_package_for_any_number_of_tokens(kind: str, tmp_path: Path) -> None:
    """Entries are adversarial, unseen rows are NaN, and arguments have any address."""
    name, per_token, counts, make = CALLS[kind]
    first = make(0, counts[0]).on(DEVICE)
    tokens = {0: torch.export.Dim("tokens", min=2, max=8192)}
    dims = tuple(tokens if place in per_token else None for place in range(len(first.tensors)))
    program = torch.export.export(
        Call(name, first.settings), first.tensors, dynamic_shapes=(dims,), strict=False
    )
    package = build_package(program, tmp_path / "call.pt2")
    with zipfile.ZipFile(package) as files:
        assert any(b"dsv4_ops_hopper" in files.read(each) for each in files.namelist())
    run = load_package(package)
    for seed, count in enumerate(counts):
        case = make(seed, count)
        given = case.on(DEVICE).tensors
        actual = run(*given)
        if count < 1000:
            batches.agrees(name, case, tuple(actual))
        if count > 10 or name == GATHERED:  # else packages combine fewer splits at a time
            assert all(map(equal, actual, batches.kernel(name, case)))
        moved = [shifted(each) if place in per_token else each for place, each in enumerate(given)]
        assert all(map(equal, run(*moved), actual))


class Moved(torch.nn.Module):
    """Queries to which Inductor would give other strides, some at an odd address."""

    def forward(self, x: Tensor, y: Tensor, flat: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        call = OPS[GATHERED].op
        odd = flat[1:].view(y.shape[1], y.shape[0], y.shape[2])
        queries = (x.permute(2, 0, 1) + y.permute(1, 0, 2), y.transpose(0, 1) * 2, odd)
        return tuple(each for q in queries for each in call(q, *rest, softmax_scale=0.05))


def test_strides_and_addresses_are_what_the_kernel_is_told(tmp_path: Path) -> None:
    """Keys, entries and lengths are inputs that begin at odd addresses in the export."""
    heads, tokens = 64, 40
    _, *rest = batches.adversarial_gathered(1, tokens, heads, 300).on(DEVICE).tensors
    shapes = ((heads, 512, tokens), (heads, tokens, 512), (heads * tokens * 512 + 1,))
    made = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
    given = (*made, *map(shifted, rest))
    module = Moved()
    program = torch.export.export(module, given)
    run = load_package(build_package(program, tmp_path / "moved.pt2"))
    assert all(map(equal, run(*given), module(*given)))
