"""Launch a Gluon kernel from an AOTInductor package, on a simulated GPU: C++ code computes results
that depend on every argument."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from dsv4_ops.kernels.aot import launch_op
from dsv4_ops.kernels.sparse_mla import gathered
from dsv4_ops.lowering import gluon
from tests.support.attention_batches import generator, integers

PLAYED = """
#include <algorithm>
#include <string>
using CUfunction = const void*;
static CUfunction loadKernel(const void* start, const std::string& name, uint32_t shared) {
    bool elf = !std::memcmp(start, "\\177ELF", 4);
    return elf && name == "hopper_gathered_keys_kernel" && shared > 200000 ? start : nullptr;
}
template <class T> static T value(void** all, int place) { return *static_cast<T*>(all[place]); }
static float wide(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float made;
    std::memcpy(&made, &word, 4);
    return made;
}
static void launchKernel(CUfunction kernel, uint32_t x, uint32_t y, uint32_t z, uint32_t warps,
                         uint32_t shared, void** all, void*) {
    if (!kernel) return;
    auto q = value<uint16_t*>(all, 0), out = value<uint16_t*>(all, 3);
    auto lse = value<float*>(all, 4), largest = value<float*>(all, 5);
    auto sink = value<float*>(all, 6);
    auto kv = value<uint16_t*>(all, 7);
    auto indices = value<int32_t*>(all, 10), lens = value<int32_t*>(all, 12);
    int32_t stride = value<int32_t>(all, 1), head = value<int32_t>(all, 2);
    int32_t tokens = value<int32_t>(all, 14), heads = value<int32_t>(all, 15);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h) {
            int place = t * heads + h;
            std::copy_n(q + t * stride + h * head, 512, out + place * 512);
            int row = indices[t * value<int32_t>(all, 11)];
            lse[place] = wide(kv[row * value<int32_t>(all, 8)]) + sink[h];
            largest[place] = lens[t] + 1e3f * value<int32_t>(all, 13) + value<int32_t>(all, 9);
        }
    bool well = shared > 200000 && !value<void*>(all, 16) && !value<void*>(all, 17);
    well &= (reinterpret_cast<uintptr_t>(q) | reinterpret_cast<uintptr_t>(kv)) % 16 == 0;
    lse[0] = well ? x + 1000.0f * y + 10000.0f * z + 100000.0f * warps : 0;
}
"""
"""The results depend on all arguments: they show a launch with one token too few, with other
strides or addresses, or with arguments in another order."""


@contextmanager
def played() -> Iterator[None]:
    """Replace the CUDA driver by C++ code."""
    definition = gluon.definition
    gluon.register()
    with mock.patch.object(
        gluon, "definition", lambda made: [*PLAYED.splitlines(), *definition(made)]
    ):
        yield


class Gathered(torch.nn.Module):
    """The launch as in the trace of a package; queries have gaps."""

    def forward(self, pairs, kv, indices, lens, sink):
        rows = (pairs[:, :, 1], kv, indices[:, 1:], lens)
        return gathered.launch_gathered_keys(launch_op.PACKAGED, *rows, sink, 0.1)


def launch_inputs(tokens, heads=8, width=65, rows=40):
    made = generator(tokens)
    pairs = torch.randn(tokens, heads, 2, 512, generator=made).bfloat16()
    kv = torch.randn(rows, 512, generator=made).bfloat16()
    indices, lens = integers(made, 0, rows, tokens, width), integers(made, 0, width, tokens)
    return pairs, kv, indices, lens, torch.randn(heads, generator=made)


class Launch:
    """A launch for any number of tokens, which 132 programs share, in place of a package's op."""

    num_results = 3

    def __init__(self, tokens: int) -> None:
        self.call, self.inputs = Gathered(), launch_inputs(tokens)

    def assert_agrees(self, runtime: str, returned: Sequence[Tensor], inputs: object) -> None:
        """Assert the results of the simulated kernel for these arguments."""
        (pairs, kv, indices, lens, sink), count = self.inputs, len(self.inputs[0])
        out, row_max, lse = returned
        assert torch.equal(out, pairs[:, :, 1]), runtime
        assert torch.equal(row_max, (lens + 1e3 * 64 + 40)[:, None].expand(-1, 8)), runtime
        assert lse[0, 0] == min(count, 132) + 1000 + 10000 + 12 * 100000, runtime
        want = kv[indices[:, 1].long(), 0].float()[:, None] + sink
        assert torch.equal(lse.flatten()[1:], want.flatten()[1:]), runtime
