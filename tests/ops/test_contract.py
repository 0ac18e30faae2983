"""Every op fulfils the whole contract of ``dsv4_ops.testing.contract.checks``."""

import contextlib
import importlib
import os
import pkgutil

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from dsv4_ops import testing
from dsv4_ops.core.registry import OPS
from dsv4_ops.reference.common import buffers_by
from dsv4_ops.testing.case import results
from dsv4_ops.testing.contract import checks
from dsv4_ops.testing.contract.compare import assert_agrees, assert_precise, equal
from tests import oracles
from tests.helpers import EVERY, NIGHTLY, SMOKE, nightly
from tests.support.quick import flags_of_users
from tests.support.sampled import for_each_call

EXAMPLES = 20_000 if NIGHTLY else int(os.environ.get("DSV4_OPS_EXAMPLES", 25))
"""Sampled calls per op; `make check` takes fewer."""
SMOKE_OPS = {
    "apply_rope", "compressed_slot_mapping", "indexer_topk", "quantize_and_insert_k_cache",
    "sinkhorn", "token_map",
}  # fmt: skip
"""One op for each kind of lowering and each hazard, which `make smoke` runs."""

each_op = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in SMOKE_OPS)) for name in OPS]
)


ORACLES = {}
for found in pkgutil.iter_modules(oracles.__path__, "tests.oracles."):
    ORACLES |= vars(importlib.import_module(found.name))


def patterns(tensor):
    """Return the values as nested lists, floats as unsigned bit patterns."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        return (tensor.view(torch.int16).to(torch.int32) & 0xFFFF).tolist()
    if tensor.dtype == torch.float32:
        return (tensor.view(torch.int32).to(torch.int64) & 0xFFFFFFFF).tolist()
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).tolist()
    return tensor.tolist()


def one_nan(values):
    """Replace the pattern of every bf16 NaN by one pattern: a conversion from float32 may change
    the payload of a NaN."""
    if isinstance(values, int):
        return 0x7FC0 if values & 0x7FFF > 0x7F80 else values
    return [one_nan(value) for value in values]


def widths(name, case):
    """Return the sizes that a nested list cannot show if it is empty."""
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
    if name in ("mla_insert_kv", "quantize_per_tensor"):
        return {"dtype": str(first.dtype).removeprefix("torch.")}
    if name in ("mla_gather_kv", "mla_gather_codes"):
        return {"width": first.shape[2]}
    if name == "verify_draft":
        return {"bf16_logits": first.dtype == torch.bfloat16}
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
    """``make test`` traces ops that ``test_compiled_equals_the_reference`` leaves out."""
    traces = None if NIGHTLY else 0 if name in VECTORS else 1
    checks.check_opcheck(OPS[name], traces=traces)


@pytest.mark.check
@each_op
def test_fake_has_the_metadata_of_the_real_result(name):
    checks.check_fake(OPS[name], traces=None if NIGHTLY else 2)  # a dense call and a strided call


FLOATS = [name for name, spec in OPS.items() if spec.implementation("testing").precise is not None]
sampled = settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def same_each_run(test):
    """Fix the seed; with ``derandomize`` an edit of the test would change the samples."""
    return test if NIGHTLY else seed(0)(test)


def assert_equals_the_oracle(name, case):
    """Assert the oracle's results and return them. The oracle is plain Python over ints, written
    from the specification without a look at the reference."""
    lists = [None if tensor is None else patterns(tensor) for tensor in case.tensors]
    expected = ORACLES[name](*lists, **case.settings, **widths(name, case))
    results = case.run(OPS[name].op, OPS[name].mutated)
    wanted = (expected,) if len(results) == 1 else expected
    for result, values in zip(results, wanted, strict=True):
        same = one_nan if result.dtype == torch.bfloat16 else list
        assert same(patterns(result)) == same(values), case.name
    return results


EXACT = [name for name in OPS if name not in FLOATS]
NARROW_ORACLES = {"mla_gather_kv", "quantize_per_tensor"}
"""These oracles support only matrices and finite scales; named cases have others."""


@pytest.mark.check
@pytest.mark.parametrize("name", [name for name in EXACT if name not in NARROW_ORACLES])
def test_reference_equals_the_oracle_in_named_cases(name):
    for case in testing.cases_of(name):
        assert_equals_the_oracle(name, case)


@pytest.mark.check
@pytest.mark.parametrize("name", EXACT)
def test_reference_equals_the_oracle(name):
    """No call writes to the results of an earlier call, either."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []

    @same_each_run
    @sampled
    @given(testing.strategy(name))
    def compare(case):
        results = assert_equals_the_oracle(name, case)
        assert all(equal(result, copy) for result, copy in before)
        before[:] = [(result, result.clone()) for result in results]

    compare()


@pytest.mark.check
@pytest.mark.parametrize("name", FLOATS)
def test_reference_is_within_the_budget_of_float64(name):
    spec = OPS[name]

    def check(case):
        outcome = case.run(spec.reference, spec.mutated)
        assert_precise(f"{name}, {case.name}", spec.implementation("testing"), case, outcome)

    for_each_call(name, check, lambda test: same_each_run(sampled(test)))


@each_op
def test_the_form_that_is_traced_gives_the_same_bits(name):
    """Eagerly, a reference may index whole rows, or only finished windows; a trace cannot."""
    spec = OPS[name]

    @same_each_run
    @settings(sampled, max_examples=EXAMPLES if NIGHTLY else 5)
    @given(testing.strategy(name))
    def compare(case):
        eager = case.copy().run(spec.reference, spec.mutated)
        with buffers_by(lambda values: values):
            traced = case.copy().run(spec.reference, spec.mutated)
        assert all(map(equal, eager, traced))

    compare()


def apart(tensor):
    """Return equal values with reversed dimensions in memory, each value beside a copy."""
    order = [*range(tensor.dim())][::-1]
    return torch.stack([tensor.permute(order)] * 2, -1)[..., 0].permute(order)


@each_op
def test_strides_change_nothing(name):
    """Rows of caches stay dense here; ``check_cases`` has caches with gaps between rows."""
    spec = OPS[name]
    dense = {*spec.mutated}
    caches = [each for each in spec.parameters if each.endswith("cache")]
    dense |= {spec.parameters.index(each) for each in caches if each != "cos_sin_cache"}

    @same_each_run
    @settings(sampled, max_examples=EXAMPLES if NIGHTLY else 3)
    @given(testing.strategy(name))
    def compare(case):
        tensors = [
            tensor if tensor is None or place in dense else apart(tensor)
            for place, tensor in enumerate(case.copy().tensors)
        ]
        result = spec.op(*tensors, **case.settings)
        outcome = results(result, *(tensors[place] for place in spec.mutated))
        expected = case.run(spec.op, spec.mutated)
        assert_agrees("strided", spec.implementation("testing"), case, outcome, expected)

    compare()


VECTORS = {
    "apply_rope", "compressed_slot_mapping", "dense_compressed_indices", "indexer_quantize_q",
    "indexer_topk", "quantize_and_insert_k_cache", "save_compressor_states", "sinkhorn",
    "sparse_mla_decode", "swa_indices_and_lens", "token_map",
}  # fmt: skip
"""One op for each kind of loop, compiled with SIMD, as for users. `make test-all` compiles the
other ops, whose loops have the same parts; test_opcheck runs what they trace to."""
COMPILED_EXAMPLES = EXAMPLES if NIGHTLY else 16
"""Compiled calls are cheap, their references are not; tests with oracles run more references."""


def is_fused(name):
    """Return whether an op writes or is built from IR; Inductor fuses decomposed ops like aten."""
    return bool(OPS[name].mutated) or "pointwise" in OPS[name].lowering.values()


AT_ONCE = 12
"""Tensor arguments of one compiled graph. Each argument adds symbols for its sizes; Inductor's time
grows faster than their number: beyond 12, a second compilation is cheaper."""


ALONE = {"split_prefill_chunks"}
"""Ops whose loops take Inductor half a minute, and longer beside others."""


def num_tensors(name):
    return sum("Tensor" in str(argument.type) for argument in OPS[name].op._schema.arguments)


def split(names):
    """Yield groups of ``names`` with at most AT_ONCE tensor arguments; a larger op is alone."""
    group, count = [], 0
    for name in names:
        added = AT_ONCE if name in ALONE else num_tensors(name) * (1 + (EVERY and is_fused(name)))
        if group and count + added > AT_ONCE:
            yield group
            group, count = [], 0
        group.append(name)
        count += added
    if group:
        yield group


def groups():
    """Yield groups of ops with one kind of loop, which share a graph; they include every new op."""
    nightly = pytest.mark.nightly("test_opcheck; loops of each kind are those of VECTORS")
    chosen = {"smoke": SMOKE_OPS, "vectors": VECTORS - SMOKE_OPS, "rest": OPS.keys() - VECTORS}
    marks = {"smoke": [pytest.mark.smoke], "vectors": [], "rest": [nightly]}
    for kind, names in chosen.items():
        some = [name for name in OPS if name in names]
        for group in split(sorted(some, key=ALONE.__contains__)):
            yield pytest.param(group, id="-".join(group), marks=marks[kind])


@pytest.mark.slow
@pytest.mark.parametrize("names", [*groups()])
def test_compiled_equals_the_reference(names):
    """The ops are one graph without opaque calls, which does not recompile for other sizes. In
    `make smoke`, SMOKE_OPS have the compiler flags that users get.

    An op that writes, or has IR of its own, is between a producer and a consumer, where more can go
    wrong. `make test-all` and `make lanes` also compile it alone."""
    fused = [OPS[name] for name in names if is_fused(name)]
    specs = [OPS[name] for name in names if EVERY or not is_fused(name)]
    of_users = SMOKE_OPS.issuperset(names) and (SMOKE or NIGHTLY)
    flags = flags_of_users() if of_users else contextlib.nullcontext()
    with torch._inductor.config.patch({"cpp.simdlen": None}), flags:
        compiled = checks.CompiledOps(specs, fused=fused)
    compiled.check_cases()
    compiled.fuzz(COMPILED_EXAMPLES, derandomize=not NIGHTLY)


def test_every_op_is_compiled():
    compiled = [name for group in groups() for name in group.values[0]]
    assert len(compiled) == len(set(compiled))
    assert set(OPS) == set(compiled)


@pytest.mark.parametrize("name", ["compressed_slot_mapping", "token_map"])
def test_compiled_takes_column_slices(name):
    """Schedulers pass views of persistent buffers; decomposed and IR lowerings respect strides."""
    checks.CompiledOps([OPS[name]], layout=checks.strided_copy).fuzz(20)


@pytest.mark.parametrize(
    "name", ["swa_indices_and_lens", *nightly("the loops of the other", "compress_and_insert")]
)
def test_compiled_loops_are_parallel(name):
    """Two threads write what one thread would, whatever the number of threads of this process and
    the size of the first batch."""
    with torch._inductor.config.patch({"cpp.threads": 2, "cpp.min_chunk_size": 1}):
        compiled = checks.CompiledOps([OPS[name]])
        assert "#pragma omp parallel num_threads(2)" in compiled.code
        compiled.fuzz(20)


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
        "token_map": (torch.arange(size + 1).int(), torch.full((size,), 9).int()),
    }[name]
    kwargs = {"block_size": 4, "window_size": 4} if name != "token_map" else {"num_tokens": size}
    public = spec.implementation("ops")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: public(*given, **kwargs), fullgraph=True, dynamic=True)
    checks.assert_same(name, compiled(*batch), public(*batch, **kwargs))


def test_a_broken_lowering_is_noticed(monkeypatch):
    """The contract can fail: a lowering that is off by one does not pass."""
    from dsv4_ops.lowering import indices
    from dsv4_ops.lowering.kinds import Decompose
    from dsv4_ops.reference import indices as reference

    wrong = Decompose(lambda *args, **kwargs: reference.prefill_gather_lens(*args, **kwargs) + 1)
    monkeypatch.setattr(indices, "prefill_gather_lens", wrong, raising=False)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with uncached, pytest.raises(AssertionError, match="differs"):
        checks.CompiledOps([OPS["prefill_gather_lens"]])


@pytest.mark.slow
def test_assert_contract_is_what_users_call():
    # tests/compile/test_export.py builds such packages
    testing.assert_contract("prefill_gather_lens", examples=10, package=NIGHTLY)


def test_assert_contract_names_an_unknown_op():
    with pytest.raises(ValueError, match=r"^assert_contract: op must be a name in the registry"):
        testing.assert_contract("no_such_op")
