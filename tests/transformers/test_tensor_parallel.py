"""Hugging Face's tensor parallelism: ``from_pretrained(tp_plan="auto")``, then ``patch``."""

import os

import pytest
import torch

pytest.importorskip("transformers", "5.23", reason="splits DeepSeek-V4 since")
pytest.importorskip("accelerate", reason="transformers loads split models with it")

import transformers

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.testing.models import SLIDING, small_model
from tests.helpers import NIGHTLY
from tests.support.hf_models import text
from tests.support.ranks import run_ranks

LENGTH = 24


@torch.no_grad()
def rank_checks(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    want = torch.load(folder / "want.pt")
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder / "model", tp_plan="auto", attn_implementation="eager"
    ).eval()
    weight, config = model.model.layers[0].mlp.experts.gate_up_proj, model.config
    share = weight.to_local() if hasattr(weight, "to_local") else weight
    whole = config.n_routed_experts * 2 * config.moe_intermediate_size * config.hidden_size
    assert 2 * share.numel() == whole, "each process has half of the experts"
    for precision in ("reference", "serve") if NIGHTLY else ("reference",):
        v4.patch(model, kv="fp32", precision=precision)
        cache = v4.PagedCache.for_model(model, max_batch_size=1, max_cache_len=64)
        tokens, length = want["tokens"], want["tokens"].shape[1]
        got = model(tokens[:, : length - 1], cache=cache).logits
        torch.testing.assert_close(got, want["logits"][:, :-1], rtol=0, atol=3e-5)
        ints = ([0, 1], [length], [0])
        last = [torch.tensor(values, dtype=torch.int32) for values in ints]
        step = v4.decode_step
        if precision == "reference":
            step = torch.compile(step, fullgraph=True, backend="eager")
        got = step(model, v4.StepBatch(tokens[0, -1:], *last), cache.tensors)
        torch.testing.assert_close(got, want["logits"][:, -1], rtol=0, atol=3e-5)
        v4.unpatch(model)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_processes(tmp_path):
    """Both processes have Hugging Face's logits of the whole model, eager and in one graph."""
    model, tokens = small_model(layer_types=[SLIDING]), text()[:1, :LENGTH]
    model.save_pretrained(tmp_path / "model")
    torch.save({"tokens": tokens.clone(), "logits": model(tokens).logits}, tmp_path / "want.pt")
    run_ranks(2, rank_checks, tmp_path, tmp_path)
