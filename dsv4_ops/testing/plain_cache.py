"""Cases and strategies of the unquantised key cache."""

from __future__ import annotations

from typing import Any

import torch

from dsv4_ops.testing.case import Case, OpTesting, i64


def _cases() -> list[Case]:
    k = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    cache = torch.full((2, 2, 2), 9.0)
    written = [[[9.0, 9.0], [9.0, 9.0]], [[9.0, 9.0], [1.0, 2.0]]]
    return [
        Case("fp32", (k, cache, i64([3, -1])), {}, (written,)),
        Case("bf16", (k.bfloat16(), cache.bfloat16(), i64([3, 4])), {}, (written,)),
        Case("no slot", (k, cache, i64([-1, 4])), {}, (cache.tolist(),)),
        Case("no token", (k, cache, i64([])), {}, (cache.tolist(),)),
        Case("no page", (k, cache[:0], i64([0])), {}, ([],)),
    ]


def _call(draw: Any, settings: dict[str, Any], min_size: int) -> Case:
    from hypothesis import strategies as st

    from dsv4_ops.testing.caches import generator, keys, random_keys, slots

    num_tokens = max(draw(st.sampled_from((0, 1, 2, 3, 5, 9, 17))), min_size)
    num_blocks = max(draw(st.sampled_from((0, 1, 2, 3, 8))), min_size)
    num_rows = num_tokens + draw(st.sampled_from((0, 0, 1, 4)))
    width = 512 if min_size else draw(st.sampled_from((512, 1, 24)))
    block_size = 4 if min_size else draw(st.sampled_from((1, 4, 64)))
    k = draw(keys(num_rows=num_rows, width=width, special=0))
    seed = generator(draw)
    cache = random_keys(seed, num_blocks * block_size, width).view(num_blocks, block_size, width)
    if not min_size and draw(st.booleans()):
        k, cache = k.float(), cache.float()
    order = draw(slots(num_tokens=num_tokens, num_slots=num_blocks * block_size))
    return Case("drawn", (k, cache, order), settings)


insert_k_cache = OpTesting(cases=_cases, settings=({},), make=_call)
insert_k_cache_functional = insert_k_cache
