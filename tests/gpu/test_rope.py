"""Rotation, norm, insert and packing on a GPU: bytes of the fused insert, kernels of the graphs,
offsets beyond 32 bits. Run there with ``pytest -m gpu tests``."""

import pytest
import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.core.layout import MainLayout, PlainLayout
from dsv4_ops.lowering.inspect import compile_and_get_code
from dsv4_ops.testing.contract.compare import assert_agrees

YARN = {"theta": 160000.0, "scaling": ops.YarnScaling()}
LAYOUTS = ("v4_fp8", "plain")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)


def cache_of(layout: str, num_blocks: int, block_size: int = 64) -> torch.Tensor:
    made = PlainLayout(block_size) if layout == "plain" else MainLayout(block_size)
    cache = made.allocate(num_blocks, "cuda")
    return cache.fill_(7 if layout == "plain" else 0xA5)


def insert(kv, cache, slots, layout):
    if layout == "plain":
        ops.insert_k_cache(kv, cache, slots)
    else:
        ops.quantize_and_insert_k_cache(kv, cache, slots, block_size=64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 5, 128, 8192])
def test_insert_has_the_bytes_of_rotation_and_insert(layout, num_tokens):
    """Four million values over 80 powers of two, late positions, and tokens without a slot."""
    table = ops.rope_cos_sin_cache(2**20, **YARN, device="cuda")
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    scale = torch.randint(-40, 40, (num_tokens, 8, 1), generator=generator, device="cuda")
    kv = (normal(num_tokens, 8, 64).float() * torch.exp2(scale)).view(num_tokens, 512).bfloat16()
    where = torch.randint(-3, 2**20 + 3, (num_tokens,), generator=generator, device="cuda")
    slots = torch.randperm(256 * 64, generator=generator, device="cuda")[:num_tokens] - 2
    fused, apart = cache_of(layout, 256), cache_of(layout, 256)
    q = normal(num_tokens, 3, 512, seed=1)
    ops.qnorm_rope_kv_insert(
        q, kv, fused, slots, where, table, eps=1e-6, block_size=64, layout=layout
    )
    insert(ops.apply_rope(kv, where, table), apart, slots, layout)
    assert torch.equal(fused, apart)
    assert int((fused != cache_of(layout, 256)).sum()) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_bf16_value_is_rotated_and_stored_as_on_the_cpu(layout):
    """All 65536 bit patterns are first and second values of pairs; NaN becomes 0x7FC0."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(3)
    kv = torch.zeros(2048, 512, dtype=torch.bfloat16)
    shuffled = bits[torch.randperm(65536, generator=generator)].repeat(2)
    kv[:, 448:] = shuffled.view(2048, 64).view(torch.bfloat16)
    table = ops.rope_cos_sin_cache(2048, **YARN)
    where, slots = torch.arange(2048), torch.randperm(2048, generator=generator)
    q = torch.zeros(2048, 0, 512, dtype=torch.bfloat16)
    on_cpu = cache_of(layout, 32).cpu()
    cache = on_cpu.cuda()
    options = {"eps": 1e-6, "block_size": 64, "layout": layout}
    ops.qnorm_rope_kv_insert(q, kv, on_cpu, slots, where, table, **options)
    moved = (tensor.cuda() for tensor in (slots, where, table))
    ops.qnorm_rope_kv_insert(q.cuda(), kv.cuda(), cache, *moved, **options)
    as_bytes = [tensor.contiguous().view(torch.uint8).cpu() for tensor in (cache, on_cpu)]
    assert torch.equal(*as_bytes)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("apply_rope", {}),
        ("inverse_rope_group", {"num_groups": 8}),
        ("inverse_rope_group_quantize", {"num_groups": 8, "scale_layout": "row"}),
        ("inverse_rope_group_quantize", {"num_groups": 8, "scale_layout": "column_padded"}),
        ("inverse_rope_group_quantize", {"num_groups": 8, "scale_layout": "ue8m0_packed"}),
    ],
    ids=str,
)
def test_graph_is_one_kernel(name, kwargs):
    torch._dynamo.reset()
    op = getattr(ops, name)
    compiled = torch.compile(lambda *tensors: op(*tensors, **kwargs), fullgraph=True)
    arguments = (
        normal(129, 64, 512),
        torch.arange(129, device="cuda"),
        ops.rope_cos_sin_cache(4096, **YARN, device="cuda"),
    )
    _, code = compile_and_get_code(compiled, *arguments)
    assert code.count(".run(") == 1


def test_rotation_and_quantisation_over_many_values():
    """16 million values, compiled: the dequantised rows are within the budget of the reference."""
    torch._dynamo.reset()
    options = {"num_groups": 8, "scale_layout": "column_padded"}
    compiled = torch.compile(
        lambda *tensors: ops.inverse_rope_group_quantize(*tensors, **options), fullgraph=True
    )
    tensors = (
        normal(511, 64, 512),
        torch.arange(511, device="cuda") * 2000,
        ops.rope_cos_sin_cache(2**20, **YARN, device="cuda"),
    )
    case = testing.Case("called", tensors, options)
    op_testing = testing.op_testing("inverse_rope_group_quantize")
    actual, expected = compiled(*tensors), ops.inverse_rope_group_quantize(*tensors, **options)
    assert_agrees("compiled", op_testing, case, actual, expected)
    left, right = (result.values.view(torch.uint8) for result in (actual, expected))
    assert (left != right).float().mean() < 1e-3, "only a contracted sum may change a code"


def test_queries_beyond_32_bits(gpu_memory_alone):
    """Inputs and outputs have more than 2^31 elements, and the grid more than 65535 programs."""
    num_tokens, heads = 66000, 64
    table = ops.rope_cos_sin_cache(64, **YARN, device="cuda")
    q = torch.zeros(num_tokens, heads, 512, dtype=torch.bfloat16, device="cuda")
    assert q.numel() > 2**31
    few = [0, 1, 32767, 32768, 65535, 65536, num_tokens - 1]
    q[few] = normal(len(few), heads, 512)
    where = torch.arange(num_tokens, device="cuda") % 64
    cache, slots = cache_of("v4_fp8", 1100), torch.arange(num_tokens, device="cuda")
    kv = normal(num_tokens, 512)
    options = {"eps": 1e-6, "block_size": 64}
    out = ops.qnorm_rope_kv_insert(q, kv, cache, slots, where, table, **options)
    small = cache_of("v4_fp8", 1)
    expected = ops.qnorm_rope_kv_insert(
        q[few], kv[few], small, slots[: len(few)], where[few], table, **options
    )
    assert torch.equal(out[few], expected)
    rest = torch.ones(num_tokens, dtype=torch.bool, device="cuda")
    rest[few] = False
    assert not out[rest].any()
    apart = cache_of("v4_fp8", 1100)
    insert(ops.apply_rope(kv, where, table), apart, slots, "v4_fp8")
    assert torch.equal(cache, apart)
    del q, out, kv, rest
    torch.cuda.empty_cache()
