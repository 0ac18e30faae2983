"""Oracle of the draft layer, from its formula, over whole sequences and without a cache.

    x[k] = e_proj(enorm(embed(t[i + 1]))) + h_proj(hnorm(streams[i][k])), embed 0 at i = 0
    x = Block(x), a sliding layer at position i
    logits = head(norm(hc_head(x)))

Block, ``hc_head`` and ``norm`` are Hugging Face's modules, loaded from a checkpoint of one layer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4_ops.testing.checkpoint import tensors

_OWN = ("e_proj", "h_proj", "enorm", "hnorm")


def dequantised_model(path: Path) -> Any:
    """Load a checkpoint as Hugging Face's model in bf16."""
    import transformers

    config = transformers.FineGrainedFP8Config(dequantize=True)
    kind = transformers.DeepseekV4ForCausalLM
    return kind.from_pretrained(path, quantization_config=config).eval().requires_grad_(False)


def float32_model(path: Path) -> Any:
    model = dequantised_model(path).float()
    model.config.dtype = torch.float32
    return model


def _as_layer(name: str) -> str:
    return name if name.startswith(("norm.", "hc_head_")) else f"layers.0.{name}"


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    values = torch.exp2(scale.view(torch.uint8).float() - 127)
    return codes.float() * values.repeat_interleave(128, 0).repeat_interleave(128, 1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class MtpOracle:
    """The draft layer of a checkpoint.

    Args:
        path: The checkpoint.
        folder: A folder for the checkpoint from which Hugging Face loads Block.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        held = dict(tensors(path))
        self.trunk = float32_model(path)
        draft = {name[6:]: held[name] for name in held if name.startswith("mtp.0.")}
        part = {name: draft.pop(name) for name in list(draft) if name.split(".")[0] in _OWN}
        files = {_as_layer(name): value for name, value in draft.items()}
        files |= {name: held[name] for name in ("embed.weight", "head.weight")}
        config = json.loads((path / "config.json").read_text())
        config |= {"num_hidden_layers": 1, "num_hash_layers": 0, "compress_ratios": [0]}
        folder.mkdir()
        save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
        self.block = float32_model(folder)
        pairs = ((part[f"{name}.weight"], part[f"{name}.scale"]) for name in ("e_proj", "h_proj"))
        self.e, self.h = (_dequantized(*pair) for pair in pairs)
        self.enorm, self.hnorm = (part[f"{name}.weight"].float() for name in ("enorm", "hnorm"))

    @torch.no_grad()
    def streams(self, tokens: Tensor) -> Tensor:
        """Return the residual streams of the trunk, [batch, length, streams, width]."""
        seen = []
        hook = self.trunk.model.layers[-1].register_forward_hook(
            lambda module, inputs, output: seen.append(output)
        )
        self.trunk(tokens, use_cache=False)
        hook.remove()
        return seen[0]

    @torch.no_grad()
    def draft(self, streams: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the token after ``following``, and the draft layer's streams."""
        embedded = self.trunk.model.embed_tokens.weight[following].clone()
        embedded[:, 0] = 0
        eps = self.trunk.config.rms_norm_eps
        x = (normed(embedded, self.enorm, eps) @ self.e.mT)[:, :, None]
        x = x + normed(streams, self.hnorm, eps) @ self.h.mT
        seen = []

        def give(module: Any, args: Any, kwargs: Any) -> Any:
            return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

        layer = self.block.model.layers[0]
        hooks = [
            layer.register_forward_pre_hook(give, with_kwargs=True),
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output)),
        ]
        hidden = self.block.model(following, use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return hidden @ self.trunk.lm_head.weight.mT, seen[0]
