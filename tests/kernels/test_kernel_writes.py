"""Which arguments torch believes that kernels write to. Torch would copy an argument too many, or
would make no CUDA graphs of compiled code."""

import signal

import pytest
from torch._higher_order_ops import triton_kernel_wrap

pytest.importorskip("triton", reason="published for Linux only")

from dsv4_ops.cli import kernels  # imports triton
from dsv4_ops.kernels.common.attention.combine import combine_listed_kernel
from tests.helpers import nightly
from tests.support.hopper import Hopper

SECONDS = 5.0
# torch 2.11 takes the ints of a launch for constants
INTS_ARE_CONSTANTS = hasattr(triton_kernel_wrap, "identify_mutated_tensors")
WRITTEN = {  # kernels that are not named here write to out
    f"{name}_kernel": set(written.split())
    for names, written in (
        ("compact_pages list_pages", "out lens_out"),
        ("compress_and_insert insert_pooled insert_rows quantize_and_insert", "k_cache"),
        ("expert_counts", "counts"),
        ("expert_plan", "sorted_rows expert_of_block num_blocks x_reordered"),
        ("sum_and_norm", "first second"),
        ("fill_absent", "logits"),
        ("find_spans", "ends counts compressed"),
        ("finish_heads combine_listed combine_splits mla_prefill prefill_keys", "out lse"),
        ("gather_indexer", "out scales_out"),
        ("insert_c4_step", "q_out codes weights_out swa_cache states k_cache indexer_states "
         "indexer_cache"),
        ("list_rows", "out lens_out sink_out"),
        ("list_slots", "swa_out swa_lens_out extra_out extra_lens_out sink_out"),
        ("merge_groups", "keys indices"),
        ("merge_parts", "keys indices out"),
        ("mla_decode split_keys", "out lse partial partial_lse partial_scale"),
        ("mla_insert", "kv_cache"),
        ("order_scales", "ordered"),
        ("pool_windows", "pooled"),
        ("inverse_rope_group", "values scales"),
        ("qnorm_rope_kv_insert", "k_cache out"),
        ("quantize_ordered", "codes ordered"),
        ("quantize_query", "out weights_out"),
        ("choose_experts grouped_topk", "ids weights"),
        ("round_rows", "rows"),
        ("router_products", "partial"),
        ("save_compressor_states", "states"),
        ("keep_keys", "keys rows counts cuts"),
        ("score_keys", "scores samples"),
        ("select_kept", "keys rows out"),
        ("select_keys select_logits", "keys indices plan out"),
        ("sparse_mla_plan", "plan"),
        ("stream_ends", "post mix out"),
        ("stream_products", "written partial"),
    )
    for name in names.split()
}  # fmt: skip


def taken_for_written(launch):
    """Return the tensors that, as this version of torch believes, the kernel writes to."""
    names = launch.kernel.arg_names
    arguments = dict(zip(names, launch.args, strict=False))
    arguments |= {name: value for name, value in launch.kwargs.items() if name in names}
    if INTS_ARE_CONSTANTS:
        return set(triton_kernel_wrap.identify_mutated_tensors(launch.kernel, arguments, {}))
    found = triton_kernel_wrap.identify_accessed_tensors(launch.kernel, arguments, {})
    return {item.name for item in found.read_writes.writes}


@pytest.fixture
def bounded(monkeypatch):
    """Install the driver, and limit the processor time to SECONDS."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", Hopper())

    def too_long(*_):
        pytest.fail(f"torch needs more than {SECONDS} s: it follows every path in the kernel")

    before = signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


WITH_A_KERNEL_OF_THEIR_OWN = {
    "compress_and_insert, C128", "experts, 128 tokens", "experts, activations in fp8",
    "experts, codes", "fp8_linear, 64 codes", "gather_k_cache, plain",
    "hyper_connection, of 1024", "indexer_logits, deep_gemm", "mla_decode, flash_mla",
    "sparse_mla_decode, flash_mla", "sparse_mla_decode_paged, 64 tokens",
}  # fmt: skip
MAIN, VARIANTS = [], []
for each in kernels.examples():
    is_main = "," not in each or each in WITH_A_KERNEL_OF_THEIR_OWN
    (MAIN if is_main else VARIANTS).append(each)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("example", [*MAIN, *nightly("other examples of the op", *VARIANTS)])
def test_torch_takes_no_other_argument_for_written_to(example):
    arguments, settings = kernels.examples()[example]
    name = example.partition(",")[0]
    launches = kernels.recorded(name, arguments, settings)
    here = kernels.recorded(name, arguments, settings, (9, 0))
    launches += [launch for launch in here if launch.kernel is combine_listed_kernel]
    if example == "experts, codes":
        launches = here
    found = [taken_for_written(launch) for launch in launches]
    saved = {"states"} if example.startswith("save_and_compress") else set()
    wanted = [WRITTEN.get(launch.kernel.__name__, {"out"}) for launch in launches]
    reorders = [launch.kwargs.get("REORDER") is not None for launch in launches]
    wanted = [
        (written | saved) - ({"x_reordered"} if not each else set())
        for written, each in zip(wanted, reorders, strict=True)
    ]
    if example == "insert_c4_step, save_first":
        wanted[-1] = wanted[-1] - {"states", "indexer_states"}  # earlier launches save them
    if example == "experts, codes":
        names = [launch.kernel.__name__ for launch in launches]
        for product in ("gate_up_kernel", "down_kernel"):
            wanted[names.index(product)] = {"out", "out_of_reach"}
    if example == "hyper_connection":
        wanted[0] = {"partial"}  # no earlier block's output is added to the streams
    if example == "hyper_connection, of 1024":
        wanted[1:] = {"out"}, {"post", "mix"}  # two launches for the streams' ends
    if example == "inverse_rope_group":
        wanted[0] = {"values"}  # bf16 has no scales
    if example.startswith("sparse_mla_prefill, flash_mla"):
        wanted[-1] = {"lse"}  # no inverse RoPE
    if INTS_ARE_CONSTANTS:  # one kernel lacks a branch; the next kernel stores
        assert all(left <= right for left, right in zip(found, wanted, strict=True)), found
        found, wanted = set().union(*found), set().union(*wanted)
    assert found == wanted
