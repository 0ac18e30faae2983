"""torch's flash attention behind ``mla_prefill``: what it is given, and what its results become."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch import choice
from dsv4_ops.kernels.external import flash_attn
from dsv4_ops.testing.case import Case
from dsv4_ops.testing.cases.mla_context import ragged_prefill
from dsv4_ops.testing.contract.compare import assert_agrees
from tests.fakes.flash_attn import flash_attention_forward
from tests.helpers import i32

SPEC = OPS["mla_prefill"]
LENS = [(3, 5), (0, 2), (17, 0), (1, 1), (8, 33), (5, 2)]


def tensors(**kwargs):
    return ragged_prefill(torch.Generator().manual_seed(0), LENS, **kwargs)


def check(monkeypatch, given, causal):
    monkeypatch.setattr(flash_attn, "_forward", flash_attention_forward)
    settings = {"softmax_scale": 0.2, "causal": causal}
    case = Case("flash attention", tuple(given), settings)
    expected = case.run(SPEC.reference)
    actual = flash_attn.mla_prefill(None, *case.copy().tensors, **settings)
    assert_agrees("mla_prefill", testing.op_testing("mla_prefill"), case, actual, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_the_adapter_gives_what_the_reference_does(monkeypatch, causal):
    """Ragged requests, some without queries or keys, NaN in padding, values narrower than keys."""
    check(monkeypatch, tensors(), causal)


@pytest.mark.parametrize("causal", [False, True])
def test_bounds_past_the_tensors(monkeypatch, causal):
    """The last request has fewer queries and keys than its bounds say: 2 of 5 queries are there,
    and causal ones see no more for that."""
    q, *keys, start_loc, cu_seq_lens = tensors(padding=(0, 0))
    check(monkeypatch, (q[:-3], *(each[:-1] for each in keys), start_loc, cu_seq_lens), causal)


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_before_the_first_request(monkeypatch, causal):
    """Decodes come first: the prefills' bounds begin behind them."""
    q, *keys, start_loc, cu_seq_lens = tensors()
    check(monkeypatch, (q, *keys, start_loc.clamp(min=4), cu_seq_lens), causal)


@pytest.mark.parametrize("causal", [False, True])
def test_nan_is_of_those_that_see_it(monkeypatch, causal):
    """The library multiplies values of keys that a query does not see with 0, and has +inf as the
    log-sum-exp of NaN."""
    given = tensors()
    given[0][8, 1, 5] = torch.nan
    given[1][40, 0, 2] = torch.nan
    given[3][9, 1] = torch.nan
    given[3][12, 2] = torch.nan
    check(monkeypatch, given, causal)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_nothing_to_do(sizes):
    q, k_nope, k_pe, v, start_loc, cu_seq_lens = tensors()
    out, lse = flash_attn.mla_prefill(
        None,
        q[: sizes[0]],
        *(each[: sizes[1]] for each in (k_nope, k_pe, v)),
        start_loc,
        cu_seq_lens,
        softmax_scale=1.0,
        causal=True,
    )
    assert out.shape == (sizes[0], 3, 32)
    assert not out.any()
    assert bool((lse == -torch.inf).all())


def shape(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("q", "v", "text"),
    [
        (shape(2, 3, 192), shape(2, 3, 128), None),
        (shape(2, 3, 192, dtype=torch.float16), shape(2, 3, 128), None),
        (
            shape(2, 3, 192, dtype=torch.float32),
            shape(2, 3, 128),
            "impl must be 'auto', 'triton' or 'reference' with torch.float32, got 'flash_attn'. "
            "Flash attention takes bfloat16 or float16.",
        ),
        *(
            (
                shape(2, 3, width),
                shape(2, 3, value),
                f"impl must be 'auto', 'triton' or 'reference' with keys of {width} and values of "
                f"{value} columns, got 'flash_attn'. Flash attention takes a multiple of 8 of "
                "them, at most 256, and no more for values.",
            )
            for width, value in ((264, 128), (20, 16), (64, 72))
        ),
    ],
)
def test_limits(q, v, text):
    def limited():
        choice.check_limit("mla_prefill", SPEC.providers, "flash_attn", {"q": q, "v": v})

    if text is None:
        limited()
        return
    with pytest.raises(NotImplementedError) as caught:
        limited()
    assert str(caught.value) == f"mla_prefill: {text}"


@pytest.fixture
def on_gpu(monkeypatch):
    """A call whose tensors seem to be on a GPU."""

    def pretend(capability=(9, 0), built=True, dtype=torch.bfloat16):
        monkeypatch.setattr(choice, "DEVICES", ("cpu", "cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
        choice.unusable.cache_clear()
        q, *rest = tensors()
        values = dict(zip(SPEC.parameters, (q.to(dtype), *rest), strict=False))
        return {**values, "causal": True, "softmax_scale": 1.0, "impl": "auto"}

    yield pretend
    choice.unusable.cache_clear()


def test_auto_takes_ours(on_gpu):
    expected = "triton", "flash attention was not faster on an H100"
    assert choice.choose(SPEC, on_gpu()) == expected


def test_an_explicit_impl_never_becomes_another(on_gpu):
    call = {**on_gpu(built=False), "impl": "flash_attn"}
    with pytest.raises(ImportError) as caught:
        choice.choose(SPEC, call)
    assert str(caught.value) == (
        "mla_prefill: impl must be one that runs here, got 'flash_attn'. "
        "Flash attention: this torch was built without it."
    )
    assert choice.choose(SPEC, {**on_gpu(), "impl": "flash_attn"}).impl == "flash_attn"


def test_on_the_cpu_the_reference_runs():
    given = (*tensors()[:4], i32([0, 5]), i32([0, 5]))
    with pytest.raises(RuntimeError, match=r"got 'flash_attn'\. Move the tensors to a CUDA device"):
        ops.mla_prefill(*given, softmax_scale=1.0, causal=True, impl="flash_attn")
