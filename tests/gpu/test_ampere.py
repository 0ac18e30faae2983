"""Code for an A100 on a Hopper card, which runs PTX for sm_80: results, not speed. The tests take
minutes: ``pytest -m gpu tests/gpu/test_ampere.py -n 14 --dist worksteal``."""

import pytest
import torch

from dsv4_ops.core.layout import IndexerLayout, MainLayout, mla_layout
from dsv4_ops.core.registry import OPS
from dsv4_ops.dispatch.limits import HOPPER_ONLY
from dsv4_ops.kernels.launcher import EAGER
from dsv4_ops.testing.contract import checks
from tests.gpu.test_contract import COMPRESSORS, OTHERS
from tests.support import every_code
from tests.support.ampere import as_an_a100
from tests.support.attention_batches import agrees_when_sampled
from tests.support.hf_models import REQUESTS, Engine, text
from tests.support.inductor_bugs import mended

DEVICE = torch.device("cuda", 0)
KERNEL_OPS = [name for name, spec in OPS.items() if spec.has_kernel and name not in HOPPER_ONLY]


@pytest.mark.usefixtures("a100")
def test_kernels_are_those_of_an_a100():
    """If this test fails, the other tests here show nothing. Every value and code is converted."""
    target = EAGER.target(DEVICE)
    assert (target.converts_codes, target.is_hopper, target.large_tiles) == (False,) * 3
    values = torch.randn(every_code.BLOCK, device=DEVICE)
    codes = torch.empty(every_code.BLOCK, dtype=torch.uint8, device=DEVICE)
    kernel = every_code._encode_kernel[1,](values, codes, CONVERTS=False, BLOCK=every_code.BLOCK)
    assert ".target sm_80" in kernel.asm["ptx"]
    assert every_code.check("cuda", False, range(256))


def random_rows(width):
    """Sample 8000 bf16 rows over 40 orders of magnitude, with NaN, infinities and zeros."""
    seed = torch.Generator("cuda").manual_seed(0)
    power = torch.randint(-60, 60, (8192, width // 64, 1), generator=seed, device=DEVICE)
    rows = torch.randn(8192, width // 64, 64, generator=seed, device=DEVICE) * torch.exp2(power)
    rows = rows.reshape(8192, width).bfloat16()
    rows[0], rows[1, :3], rows[2] = 0, torch.tensor([torch.nan, torch.inf, -torch.inf]), torch.nan
    return rows, torch.randperm(8192, generator=seed, device=DEVICE)


def written_and_read():
    """Return the bytes that inserts write and the bits that gathers read, also of garbage rows."""
    seed, found = torch.Generator("cuda").manual_seed(1), []
    counts = torch.tensor([4096, 4000, 17, 0], dtype=torch.int32, device=DEVICE)
    table = torch.arange(4 * 32, dtype=torch.int32, device=DEVICE).view(4, 32)
    for layout, op in ((MainLayout(64), "k_cache"), (IndexerLayout(64), "indexer_k")):
        rows, slots = random_rows(layout.head_dim)
        cache = torch.randint(
            0, 256, layout.shape(160), generator=seed, dtype=torch.uint8, device=DEVICE
        )
        settings = {"block_size": 64, "layout": layout.tag}
        OPS[f"quantize_and_insert_{op}"].op(rows, cache, slots, **settings)
        found.append(cache)
        if op == "k_cache":
            lens, read = (counts, None, table), {"num_rows": 2048, "offset": 0, **settings}
            found.append(OPS["gather_k_cache"].op(cache, *lens, **read).view(torch.int16))
    for tag in ("mla_fp8", "mla_ds_fp8"):
        rows, slots = random_rows(576)
        cache = mla_layout(tag, 64, 576).allocate(160, DEVICE)
        scale = torch.tensor([0.37], device=DEVICE) if tag == "mla_fp8" else None
        settings = {"block_size": 64, "layout": tag, "scale_format": "float32"}
        OPS["mla_insert_kv"].op(rows[:, :512], rows[:, 512:], cache, slots, scale, **settings)
        found.append(cache)
    return found


def test_bytes_are_those_of_hopper(tmp_path):
    expected = written_and_read()
    with as_an_a100(tmp_path):
        found = written_and_read()
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", KERNEL_OPS)
@pytest.mark.usefixtures("a100")
def test_contract(name):
    """Eager, compiled, sampled and captured calls; test_mla.py has the FP8 rows of dense MLA."""
    spec = OPS[name]
    checks.check_cases(spec, "cuda")
    if name in (*COMPRESSORS, *OTHERS):
        agrees_when_sampled(name, 0, precise=name in COMPRESSORS)
    with mended(name):
        compiled = checks.CompiledOps([spec], "cuda")
        compiled.check_cases()
        compiled.fuzz(50)
        checks.check_cuda_graph(spec)


def patched(family, **settings):
    """Return a model without discrete choices, which rounding could change."""
    from dsv4_ops.testing.models import small_mla_model, small_model

    if family == "V3":
        return small_mla_model(3, device="cuda", first_k_dense_replace=3, **settings)
    return small_model(device="cuda", mlp_layer_types=["hash_moe"] * 3, index_topk=128, **settings)


@pytest.mark.parametrize("family", ["V4", "V3"])
@torch.no_grad()
def test_a_model_compiled_and_captured(family, tmp_path, monkeypatch):
    """Prefills and 30 captured decodes in bf16, with an FP8 cache, are as exact as Hopper's."""
    pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
    from dsv4_ops.integrations import transformers as v4

    monkeypatch.setattr(torch._inductor.config.triton, "cudagraph_or_error", True)
    want = patched(family)(text().cuda()).logits
    model = v4.patch(patched(family, dtype=torch.bfloat16), kv="fp8")

    def error():
        cache = v4.PagedCache.for_model(model, max_batch_size=REQUESTS, max_cache_len=290)
        engine = Engine(model, cache, text())
        step = torch.compile(v4.decode_step, fullgraph=True, mode="reduce-overhead")
        engine.prefill(dict.fromkeys(range(REQUESTS), 120))
        for request in range(REQUESTS):
            cache.reserve(request, 200)
        counts = dict.fromkeys(range(REQUESTS), 1)
        for _ in range(30):
            engine.decode(counts, step=step)
        engine.prefill(dict.fromkeys(range(REQUESTS), 60))
        return engine.rms(want)

    on_hopper = error()
    assert on_hopper < 0.3  # logits have a standard deviation of one
    with as_an_a100(tmp_path):
        assert error() < 1.5 * on_hopper
