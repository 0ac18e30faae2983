"""When a C4 layer writes all of its caches in one call, and what it writes."""

from typing import Any

import pytest

from dsv4_ops.attention import LayerSpec
from tests.attention.test_layers import MIXED, layer_of
from tests.helpers import Called
from tests.support.layers import SPEC, changed, in_chunks

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
    with changed(layer, **chosen), Called() as called:
        in_chunks(layer, inputs[:1], [[5, 1, 3]])
    assert [name for name in called.names if name in WRITERS] == writers * 3
