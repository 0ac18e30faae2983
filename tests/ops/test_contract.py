"""Every op under the whole contract of ``dsv4_ops.testing.contract.checks``."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.testing.contract import checks
from dsv4_ops.testing.contract.compare import assert_precise
from tests.helpers import NIGHTLY
from tests.oracles import batch as oracles
from tests.oracles import compressor as oracles_compressor
from tests.oracles import experts as oracles_experts
from tests.oracles import indexer as oracles_indexer
from tests.oracles import kv as oracles_kv
from tests.oracles import pack as oracles_pack
from tests.oracles import plan as oracles_plan
from tests.oracles import sparse as oracles_sparse

EXAMPLES = 20_000 if NIGHTLY else int(os.environ.get("DSV4_OPS_EXAMPLES", 120))
"""Sampled calls per op; `make check` takes fewer."""
SMOKE = {
    "apply_rope",
    "compressed_slot_mapping",
    "indexer_topk",
    "quantize_and_insert_k_cache",
    "sinkhorn",
    "token_map",
}
"""One op of each way to a lowering and of each hazard: `make smoke` runs these."""

each_op = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE)) for name in OPS]
)


ORACLES = {
    **vars(oracles),
    **vars(oracles_compressor),
    **vars(oracles_experts),
    **vars(oracles_indexer),
    **vars(oracles_kv),
    **vars(oracles_pack),
    **vars(oracles_plan),
    **vars(oracles_sparse),
}


def patterns(tensor):
    """Values as nested lists; of floats the unsigned bit patterns."""
    if tensor.dtype == torch.bfloat16:
        return (tensor.view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
    if tensor.dtype == torch.float32:
        return (tensor.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).tolist()
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).tolist()
    return tensor.tolist()


def one_nan(values):
    """Nested lists of bf16 patterns with one pattern for every NaN: a conversion from float32 may
    change its payload."""
    if isinstance(values, int):
        return 0x7FC0 if values & 0x7FFF > 0x7F80 else values
    return [one_nan(value) for value in values]


def widths(name, case):
    """What a nested list without rows does not know."""
    first = case.tensors[0]
    if name == "expand_block_table":
        return {"columns": first.shape[1]}
    if name == "gather_k_cache" and case.settings["layout"] == "plain":
        return {"width": first.shape[2]}
    if name == "pack_seq":
        pad = torch.full((), case.settings["pad"]).to(first.dtype)
        return {"trailing": [*first.shape[1:]], "filler": patterns(pad)}
    if name == "indexer_quantize_q":
        return {"bf16_weights": case.tensors[1].dtype == torch.bfloat16}
    if name == "unpack_seq":
        return {"trailing": [*first.shape[2:]], "zero": patterns(first.new_zeros(()))}
    if name == "mixed_sparse_indices":
        compressed = case.tensors[1]
        width = None if compressed is None else compressed.shape[1]
        return {"swa_width": first.shape[1], "compressed_width": width}
    return {}


@pytest.mark.check
@each_op
def test_reference_gives_the_hand_computed_numbers(name):
    checks.check_cases(OPS[name])


@each_op
def test_opcheck(name):
    checks.check_opcheck(OPS[name], traces=None if NIGHTLY else 2)


@pytest.mark.check
@each_op
def test_fake_has_the_metadata_of_the_real_result(name):
    checks.check_fake(OPS[name])


FLOATS = [name for name, spec in OPS.items() if spec.implementation("testing").precise is not None]
drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.check
@pytest.mark.parametrize("name", [name for name in OPS if name not in FLOATS])
def test_reference_equals_the_oracle(name):
    """The oracle is plain Python over ints, written from the specification without sight of the
    reference."""
    spec = OPS[name]

    @drawn
    @given(testing.strategy(name))
    def compare(case):
        lists = [None if tensor is None else patterns(tensor) for tensor in case.tensors]
        expected = ORACLES[name](*lists, **case.settings, **widths(name, case))
        results = case.run(spec.op, spec.mutated)
        wanted = (expected,) if len(results) == 1 else expected
        for result, values in zip(results, wanted, strict=True):
            same = one_nan if result.dtype == torch.bfloat16 else list
            assert same(patterns(result)) == same(values)

    compare()


@pytest.mark.check
@pytest.mark.parametrize("name", FLOATS)
def test_reference_is_within_the_budget_of_float64(name):
    spec = OPS[name]

    @drawn
    @given(testing.strategy(name))
    def compare(case):
        outcome = case.run(spec.reference, spec.mutated)
        assert_precise(name, spec.implementation("testing"), case, outcome)

    compare()


VECTORS = {
    "apply_rope",
    "compressed_slot_mapping",
    "dense_compressed_indices",
    "indexer_quantize_q",
    "indexer_topk",
    "inverse_rope_group_quantize",
    "quantize_and_insert_k_cache",
    "save_compressor_states",
    "sinkhorn",
    "sparse_mla_decode",
    "swa_indices_and_lens",
    "token_map",
}
"""Ops compiled with vectors, as users get them: one of each kind of loop. Of the others `make test`
compiles the scalar form, half of Inductor's work; `make test-all` has the vectors of all."""
COMPILED_EXAMPLES = EXAMPLES if NIGHTLY else 40
"""A call of compiled code is cheap, its reference is not: oracles see more of the reference."""


def loops_of(name):
    scalar = name not in VECTORS and not NIGHTLY
    return torch._inductor.config.patch({"cpp.simdlen": 1} if scalar else {})


@each_op
def test_compiled_equals_the_reference(name):
    """One graph, nothing opaque, no recompile over drawn batches of any size."""
    twin = name.endswith("_functional") and name != "quantize_and_insert_k_cache_functional"
    if twin and not NIGHTLY:
        pytest.skip("a copy and the code of its op, as the twin that runs shows; nightly runs all")
    with loops_of(name):
        compiled = checks.CompiledOp(OPS[name])
    compiled.check_cases()
    compiled.fuzz(COMPILED_EXAMPLES, derandomize=not NIGHTLY)


@pytest.mark.parametrize("name", ["compressed_slot_mapping", "swa_indices_and_lens", "token_map"])
def test_compiled_takes_column_slices(name):
    """Schedulers pass views of persistent buffers; the decomposed and the IR lowerings both follow
    strides."""
    checks.CompiledOp(OPS[name], layout=checks.strided_copy).fuzz(20)


@pytest.mark.parametrize("name", ["compress_and_insert", "swa_indices_and_lens"])
def test_compiled_loops_are_parallel(name):
    """Two threads write what one would, however many this process has and however small the batch
    that it is compiled for."""
    with torch._inductor.config.patch({"cpp.threads": 2, "cpp.min_chunk_size": 1}):
        compiled = checks.CompiledOp(OPS[name])
        assert "#pragma omp parallel num_threads(2)" in compiled.code
        compiled.fuzz(20)


FUSED = [
    name for name, spec in OPS.items() if spec.mutated or "pointwise" in spec.lowering.values()
]
FUSED_WRITERS = {
    "insert_k_cache",
    "quantize_and_insert_k_cache",
    "save_compressor_states",
}
"""Writers whose fusion `make test` compiles: one tensor of bytes, one of rows, one of states."""
SAME_WRITES = pytest.mark.nightly(
    "writers of one row, one cache and states; test_compiled_cache.py has the order of writes"
)


def fused(name):
    writer = OPS[name].mutated and name not in FUSED_WRITERS
    return pytest.param(name, marks=[SAME_WRITES] * bool(writer))


@pytest.mark.parametrize("name", [fused(name) for name in FUSED])
def test_compiled_fuses_with_producers_and_consumers(name):
    with loops_of(name):
        checks.check_fusion(OPS[name])


@pytest.mark.parametrize("name", ["swa_indices_and_lens", "token_map"])
@pytest.mark.parametrize("size", [0, 1])
def test_compiled_with_sizes_that_are_specialised(name, size):
    spec = OPS[name]
    batch = {
        "swa_indices_and_lens": (
            torch.zeros(size, dtype=torch.int64),
            torch.zeros(size, dtype=torch.int32),
            torch.full((size, size), 3, dtype=torch.int32),
        ),
        "token_map": (
            torch.arange(size + 1, dtype=torch.int32),
            torch.full((size,), 9, dtype=torch.int32),
        ),
    }[name]
    kwargs = {
        "swa_indices_and_lens": {"block_size": 4, "window_size": 4},
        "token_map": {"num_tokens": size},
    }[name]
    public = spec.implementation("ops")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *tensors: public(*tensors, **kwargs), fullgraph=True, dynamic=True
    )
    checks.assert_same(name, compiled(*batch), public(*batch, **kwargs))


def test_a_broken_lowering_is_noticed(monkeypatch):
    """The contract can fail: a lowering that is off by one does not pass."""
    from dsv4_ops.lowering import indices
    from dsv4_ops.lowering.kinds import Decompose
    from dsv4_ops.reference import indices as reference

    wrong = Decompose(lambda *args, **kwargs: reference.prefill_gather_lens(*args, **kwargs) + 1)
    monkeypatch.setattr(indices, "prefill_gather_lens", wrong)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(AssertionError, match="differs"),
    ):
        checks.CompiledOp(OPS["prefill_gather_lens"])


@pytest.mark.slow
def test_assert_contract_is_what_users_call():
    testing.assert_contract("prefill_gather_lens", examples=10)


def test_assert_contract_names_an_unknown_op():
    with pytest.raises(ValueError, match=r"^assert_contract: op must be a name in the registry"):
        testing.assert_contract("no_such_op")
