"""One process of a patched model that Hugging Face splits: ``tensor_parallel.py FOLDER``, whose
``model`` is a checkpoint and ``want.pt`` the tokens and logits of the whole model."""

import sys
from pathlib import Path

import torch
import transformers

from dsv4_ops.integrations import transformers as v4


@torch.no_grad()
def main(folder: Path) -> None:
    torch.set_num_threads(1)
    want = torch.load(folder / "want.pt")
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder / "model", tp_plan="auto", attn_implementation="eager"
    ).eval()
    weight, config = model.model.layers[0].mlp.experts.gate_up_proj, model.config
    share = weight.to_local() if hasattr(weight, "to_local") else weight
    whole = config.n_routed_experts * 2 * config.moe_intermediate_size * config.hidden_size
    assert 2 * share.numel() == whole, "each process has half of the experts"
    for precision in ("reference", "serve"):
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
