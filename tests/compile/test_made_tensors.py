"""Lowerings accept tensors that a graph creates, whose sizes Inductor passes as ints."""

import torch

import dsv4_ops as ops
from dsv4_ops import testing
from dsv4_ops.testing.contract.compare import equal

OPS = ("token_map", "compressed_slot_mapping", "swa_indices_and_lens")
OPS += ("global_topk_indices_and_lens", "dense_compressed_indices")


def test_sizes_may_be_ints():
    cases = {name: testing.op_testing(name).cases()[0] for name in OPS}

    def made(tensor):
        whole = torch.arange(tensor.numel(), dtype=tensor.dtype)
        return whole.view(tensor.shape)

    def step():
        found = []
        for name, case in cases.items():
            tensors = [None if each is None else made(each) for each in case.tensors]
            result = getattr(ops, name)(*tensors, **case.settings)
            found += [result] if isinstance(result, torch.Tensor) else result
        return found

    compiled = torch.compile(step, fullgraph=True, dynamic=False)()
    assert all(map(equal, compiled, step()))


def test_requests_of_one_token_counted_in_the_graph():
    """Speculative steps count drafts in this way, and once failed to compile."""

    def step(lens):
        starts = torch.arange(len(lens) + 1, dtype=torch.int32)
        return ops.token_map(starts, lens + 1, num_tokens=len(lens))

    found = torch.compile(step, fullgraph=True, dynamic=False)(torch.tensor([5, 0, 7]).int())
    assert found.req_indices.tolist() == [0, 1, 2]
    assert found.positions.tolist() == [5, 0, 7]
