"""The Gluon kernel over listed bf16 rows: ``sparse_mla_gathered``, and prefills that copy their
rows first. The emulator runs its Python source, and raises if partitions race or deadlock."""

import math

import pytest
import torch
from hypothesis import given

from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.contract.compare import equal
from tests.helpers import assert_right, i32, nightly
from tests.support.attention_batches import GATHERED, adversarial_gathered, gathered_case
from tests.support.prefill_batches import MODES, PREFILL, prefill_case
from tests.support.sampled import sampled

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.kernels.sparse_mla import gathered, prefill
from dsv4_ops.reference import bf16_workspace
from tests.gluon_emulator import emulate as emulated

KERNEL = "hopper_gathered_keys_kernel"


def kernel(name, case, seed=0, programs=2):
    """Return the results of the launcher, whose kernel runs as ``programs`` emulated programs."""
    results, launched = emulated.results_of(name, case, seed, programs)
    assert launched == ([KERNEL] if case.tensors[0].numel() else [])
    return results


def check(name, case, seed=0, programs=2):
    actual = kernel(name, case, seed, programs)
    assert_right(name, case, actual)
    assert not actual[0].isnan().any()


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "programs"),
    [
        *((1, 1, 1, 2), (3, 128, 129, 5), (4, 12, 300, 1), (2, 65, 65, 132)),
        *nightly(
            "those before",
            *((3, 64, 64, 1), (3, 64, 64, 132), (2, 65, 65, 5), (5, 8, 128, 2)),
            *((2, 200, 70, 2), (2, 200, 70, 132)),
        ),
    ],
)
def test_lists_and_heads_of_any_size(tokens, heads, topk, programs):
    """Blocks, pairs and tiles of heads are not full; programs have no, one or several items."""
    check(GATHERED, gathered_case(tokens, tokens, heads, topk), programs, programs)


@pytest.mark.parametrize("seed", [0, *nightly("seed 0", 1, 2, 3)])
def test_schedules(seed):
    """Partitions run in other orders."""
    check(GATHERED, gathered_case(seed, 4, 64, 260), seed, 1)


@pytest.mark.parametrize("seed", [0, *nightly("seed 0", 1, 2, 3)])
def test_adversarial_values(seed):
    case = adversarial_gathered(seed, 6, 9, 200)
    check(GATHERED, case, seed)
    out, row_max, lse = kernel(GATHERED, case, seed)
    for token in (0, 1, 4):  # these tokens have no key
        assert (out[token] == 0).all()
        assert (lse[token] == -math.inf).all()
        assert (row_max[token] == -math.inf).all()


def test_a_token_of_nan_stays_alone():
    case = gathered_case(3, 5, 64, 130)
    whole = kernel(GATHERED, case, programs=1)
    case.tensors[0][2] = math.nan
    others = [0, 1, 3, 4]
    for left, right in zip(kernel(GATHERED, case, programs=1), whole, strict=True):
        assert equal(left[others], right[others])


def test_a_token_has_the_same_bits_in_every_batch():
    case = gathered_case(4, 6, 65, 130)
    whole = kernel(GATHERED, case, programs=3)
    q, kv, indices, lens, sink = case.tensors
    for chosen in (slice(0, 1), slice(2, 6)):
        some = Case("some", (q[chosen], kv, indices[chosen], lens[chosen], sink), case.settings)
        for left, right in zip(kernel(GATHERED, some), whole, strict=True):
            assert equal(left, right[chosen])


def test_logits_of_any_magnitude():
    """The largest logit comes first, last, or in either block of a pair. Sums relative to another
    maximum are scaled, and none overflows."""
    for place in (0, 63, 64, 127, 128, 191, 192, 255):
        q, kv = torch.zeros(1, 1, 512).bfloat16(), torch.zeros(257, 512).bfloat16()
        q[0, 0, 0], kv[:, 1] = 1.0, torch.arange(257) % 8
        kv[:, 0] = -300.0
        kv[place, 0] = 300.0
        lists = (torch.arange(256).int()[None], i32([256]), None)
        case = Case("peak", (q, kv, *lists), {"softmax_scale": 1.0})
        out, row_max, lse = kernel(GATHERED, case)
        assert row_max.item() == 300.0
        assert lse.item() == 300.0
        assert out[0, 0, 1].item() == place % 8


def test_queries_and_rows_of_any_strides():
    """Loads read 16 bytes at once: tensors that are not aligned to 16 bytes are copied first."""
    case = gathered_case(2, 3, 9, 70)
    expected = kernel(GATHERED, case)
    q, kv, indices, lens, sink = case.tensors
    wide = torch.zeros(3, 9, 520).bfloat16()
    wide[..., 4:516] = q
    rows = torch.zeros(len(kv), 513).bfloat16()
    rows[:, 1:] = kv
    lists = (indices.t().contiguous().t(), torch.stack([lens, lens], 1)[:, 0])
    views = (wide[..., 4:516], rows[:, 1:], *lists, torch.stack([sink, sink], 1)[:, 0])
    assert all(map(equal, kernel(GATHERED, Case("views", views, case.settings)), expected))
    transposed = (q.permute(2, 0, 1).contiguous().permute(1, 2, 0), *case.tensors[1:])
    assert all(map(equal, kernel(GATHERED, Case("t", transposed, case.settings)), expected))
    assert gathered.copied(EAGER, q) is q


@pytest.fixture
def copies(monkeypatch):
    """Let prefills of any size copy their rows, by the gather's reference."""

    def gather_rows(launch, call, sink, multiple, wanted):
        return bf16_workspace.gather_rows(call, sink, multiple)

    monkeypatch.setattr(prefill, "gathers", lambda values: True)
    monkeypatch.setattr(prefill, "gather_rows", gather_rows)


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tokens", "heads"), [(7, 8), *nightly("7 tokens", (1, 65))])
def test_prefills_by_way_of_a_copy(mode, tokens, heads):
    """Positions, requests, blocks and selections are adversarial; unread blocks are NaN."""
    check(PREFILL, prefill_case(tokens, tokens, heads, mode, topk=90, longest=400))


@pytest.mark.usefixtures("copies")
def test_named_prefills():
    for case in testing.cases_of(PREFILL):
        if case.settings["layout"] == MainLayout.tag:
            check(PREFILL, case)


SETTINGS = OPS[PREFILL].implementation("testing").settings


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("chosen", [s for s in SETTINGS if s["layout"] == MainLayout.tag])
def test_prefills_that_are_sampled(chosen):
    @sampled(10, 3)
    @given(OPS[PREFILL].implementation("testing").strategy(settings=chosen))
    def compare(case):
        check(PREFILL, case)

    compare()


@pytest.mark.usefixtures("copies")
def test_asked_for_our_kernel_a_prefill_reads_the_pages():
    """With ``impl="triton"``, bits must not depend on the number of tokens."""
    case = prefill_case(1, 3, 8, "C4", topk=20, longest=300)
    args = (*case.tensors,)
    launched = []
    for impl in ("auto", "triton"):
        emulator = emulated.Emulator(0)
        OPS[PREFILL].implementation("kernels")(emulator, *args, **case.settings, impl=impl)
        launched += emulator.launched
    assert launched == [KERNEL, "hopper_prefill_keys_kernel"]
