"""What a C4 layer writes in one call, and when it does."""

from typing import Any

import pytest
import torch

from dsv4_ops.attention import LayerSpec
from tests.attention.test_layers import MIXED, layer_of
from tests.helpers import Called
from tests.support.layers import SPEC, caches_of, in_chunks

WRITERS = {
    *("insert_c4_step", "qnorm_rope_kv_insert", "save_and_compress", "compress_and_insert"),
    *("save_compressor_states", "indexer_quantize_q"),
}
APART = ["qnorm_rope_kv_insert", "save_and_compress", "save_and_compress", "indexer_quantize_q"]
IN_RINGS = ["compress_and_insert", "save_compressor_states"] * 2


@pytest.mark.parametrize(
    ("spec", "chosen", "writers"),
    [
        (SPEC, {}, ["insert_c4_step"]),
        (SPEC, {"schedule": "prefill"}, APART),
        (SPEC, {"state_rings": True}, [APART[0], *IN_RINGS, APART[-1]]),
        (MIXED, {}, APART[1:]),
    ],
    ids=["decode", "prefill", "rings of states", "plain keys"],
)
def test_a_decode_of_c4_in_fp8_writes_in_one_call(
    spec: LayerSpec, chosen: dict[str, Any], writers: list[str]
) -> None:
    layer, inputs = layer_of("c4", spec)
    usual = {name: getattr(layer, name) for name in chosen}
    for name, value in chosen.items():
        setattr(layer, name, value)
    try:
        with Called() as called:
            in_chunks(layer, inputs[:1], [[5, 1, 3]])
    finally:
        for name, value in usual.items():
            setattr(layer, name, value)
    assert [name for name in called.names if name in WRITERS] == writers * 3


def test_one_call_writes_what_the_ops_apart_write() -> None:
    """Outputs and caches bit for bit, over decodes, chunks and steps without a token."""
    layer, inputs = layer_of("c4", SPEC)
    cuts = [[5, 0, 1, 1, 30, 2], [1, 7, 1, 0, 1, 4]]
    together = in_chunks(layer, inputs[:2], cuts)
    caches = {name: cache.clone() for name, cache in caches_of(layer).items()}
    layer.state_rings = True
    try:
        apart = in_chunks(layer, inputs[:2], cuts)
    finally:
        layer.state_rings = False
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)
    for name, cache in caches_of(layer).items():
        assert torch.equal(caches[name].view(torch.uint8), cache.view(torch.uint8)), name
