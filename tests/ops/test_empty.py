"""Calls of ops with nothing in a dimension: compiled they give what eager gives, in one graph for
many of them."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from tests.helpers import NIGHTLY
from tests.ops.error_rows.all_rows import FUNCTIONS, TENSOR_KINDS, valid_arguments
from tests.ops.error_rows.valid import valid_tensor

NOTHING = {
    "expand_block_table": "num_reqs",
    "gather_k_cache": "num_blocks",
    "indexer_logits": "num_blocks",
    "indexer_quantize_q": "num_positions",
    "pack_seq": "num_tokens",
    "sparse_mla_gathered": "num_rows",
    "unpack_seq": "num_reqs",
}


def without(op: str, dim: str) -> dict[str, Tensor | int | str | None]:
    """A valid call but for ``dim``, of which there is none."""
    given = valid_arguments(op)
    for name, parameter in inspect.signature(FUNCTIONS[op]).parameters.items():
        if parameter.annotation in TENSOR_KINDS and isinstance(given[name], Tensor):
            for axis, word in enumerate(valid_tensor(op, name).shape[1:-1].split(", ")):
                size, _, more = word.partition(" + ")
                if size == dim:
                    given[name] = given[name].narrow(axis, 0, int(more or 0)).clone()
    return given


@pytest.mark.nightly("test_fake_has_the_metadata_of_the_real_result has empty inputs")
def test_compiled_calls_with_nothing_in_a_dimension() -> None:
    calls = [(op, without(op, dim)) for op, dim in NOTHING.items()]

    def every(arguments: list[dict[str, Tensor]]) -> list[Tensor | tuple[Tensor, ...]]:
        return [FUNCTIONS[op](**each) for (op, _), each in zip(calls, arguments, strict=True)]

    given = [each for _, each in calls]
    wanted = every(given)
    assert any(math.prod(each.shape) for each in torch.utils._pytree.tree_leaves(wanted))
    torch._dynamo.reset()
    backend = "inductor" if NIGHTLY else "aot_eager"
    found = torch.compile(every, fullgraph=True, dynamic=True, backend=backend)(given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
