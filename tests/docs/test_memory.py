"""The tables of ``docs/memory.md`` show the bytes of caches and of released weights."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")

from transformers import DeepseekV4Config

from benchmarks.baselines.stock_model import LAYER_TYPES
from dsv4_ops.checkpoint.format import weight_bytes
from dsv4_ops.integrations.transformers import PagedCache
from dsv4_ops.testing.checkpoint import FLASH, PRO
from dsv4_ops.testing.models import YARN

PAGE = Path(__file__).resolve().parents[2] / "docs/memory.md"
SLIDING, C4, C128, _ = LAYER_TYPES
LAYERS = {"Flash": [SLIDING, SLIDING, *[C4, C128] * 20, C4], "Pro": [C128, *[C128, C4] * 30]}


def table(second):
    """Return the lines, as dicts, of the table whose second column has this title."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    first = next(n for n, line in enumerate(lines) if line[:2] == ["model", second])
    found = []
    for line in lines[first + 2 :]:
        if line[0] not in LAYERS:
            break
        found.append(dict(zip(lines[first], line, strict=True)))
    return found


def cache_bytes(name, requests, tokens, max_chunk):
    config = DeepseekV4Config(
        num_hidden_layers=len(LAYERS[name]), layer_types=LAYERS[name], rope_parameters=dict(YARN)
    )
    return PagedCache(
        config, max_batch_size=requests, max_cache_len=tokens, max_chunk=max_chunk, device="meta"
    ).memory()


@pytest.mark.parametrize("line", table("requests"), ids=lambda line: " ".join(line.values())[:16])
def test_a_line_has_the_parts_of_that_cache(line):
    requests, _, tokens = line["requests"].partition(" x ")
    tokens = 2**20 if tokens == "1M" else 1024 * int(tokens.removesuffix("k"))
    parts = cache_bytes(line["model"], int(requests), tokens, int(line["max_chunk"]))
    shown = {"GiB": sum(parts.values()), **parts}
    want = {name: f"{size / 2**30:.2f}" for name, size in shown.items()}
    assert {name: line[name] for name in shown} == want


@pytest.mark.parametrize("line", table("GPUs"), ids=lambda line: f"{line['model']}-{line['GPUs']}")
def test_a_line_has_the_weights_of_each_gpu(line):
    config, gpus = {"Flash": FLASH, "Pro": PRO}[line["model"]], int(line["GPUs"])
    plans = [weight_bytes(config, num_gpus=gpus, split_heads=each) for each in (False, True)]
    sums = [sum(plan.values()) for plan in plans]
    cache = sum(cache_bytes(line["model"], 8, 2**17, None).values())
    shown = {**plans[0], "sum": sums[0], "heads split": sums[1], "cache, 8 x 128k": cache}
    want = {name: f"{size / 1e9:.1f}" for name, size in shown.items()}
    assert {name: line[name] for name in shown} == want
