"""Public functions with a value of a wrong type or size in any argument: they raise one clear error
before anything runs or loads."""

import functools
import re

import pytest
import torch
import transformers

from dsv4_ops.cli import serve
from dsv4_ops.core.versions import release
from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.batching import hooks
from dsv4_ops.testing.models import small_mla_model

VALUES = {
    "7": 7, "-1": -1, "0": 0, "1.5": 1.5, "nan": float("nan"), "str": "x", "bytes": b"x",
    "list": [], "dict": {}, "True": True, "None": None, "object": object(), "function": len,
    "tensor": torch.ones(2),
}  # fmt: skip
FLAG, COUNT, COUNT_OR_NONE = "True", "7", "7 None"
SIZES = dict.fromkeys(("max_batch_size", "max_cache_len", "next_n"), COUNT)
COUNTS = ("max_new_tokens", "max_length", "num_beams", "prefill_chunk_size")
ACCEPTED = {
    "patch": dict.fromkeys(("model", "kv", "precision", "impl"), "")
     | dict.fromkeys(("batch_invariant", "plan", "score"), FLAG)
     | dict.fromkeys(("parallel", "query"), "None"),
    "PagedCache": SIZES | dict.fromkeys(("num_blocks", "max_chunk"), COUNT_OR_NONE)
     | dict.fromkeys(("config", "kv", "precision"), "")
     | {"parallel": "None", "draft_layer": FLAG, "device": "None"},
    "compile_step": dict.fromkeys(("model", "step", "mode", "unknown"), "")
     | {"cache_file": "str None", "on_part": "function None", "backend": "function"}
     | {"fullgraph": FLAG, "dynamic": "True None", "options": "dict None"},
    "forward": dict.fromkeys(("input_ids", "scored"), "")
     | dict.fromkeys(("attention_mask", "position_ids", "inputs_embeds"), "None")
     | {"cache": "None"},
    "crop": {"tokens_to_remove": "7 -1 0 True"},
    "generate": dict.fromkeys(("input_ids", "inputs_embeds", "position_ids", "cache"), "None")
     | dict.fromkeys(("past_key_values", "generation_config", "streamer"), "None")
     | dict.fromkeys(("attention_mask", "num_draft_tokens"), "None")
     | dict.fromkeys(("logits_processor", "stopping_criteria"), "list None")
     | dict.fromkeys(COUNTS, COUNT_OR_NONE),
    "generate_batch": dict.fromkeys(("generation_config", "continuous_batching_config"), "None")
     | dict.fromkeys(("record_timestamps", "progress_bar", "persistent_manager", "warmup"), FLAG)
     | {"inputs": "list", "max_new_tokens": COUNT_OR_NONE}
     | dict.fromkeys(("max_length", "do_sample", "unknown"), "None"),
    "load_quantized": dict.fromkeys(("gguf_file", "state_dict", "config", "device_map"), "None")
     | {"path": "", "scales": FLAG, "use_safetensors": "True None"},
    "serve": dict.fromkeys(("max_cache_len", "max_requests", "max_batch_tokens"), COUNT)
     | {"max_queue": COUNT, "num_blocks": COUNT_OR_NONE, "port": "7 0", "quantized": FLAG}
     | {"host": "str", "dtype": "", "device": "None", "compile": "None function",
     "on_progress": "function"},
}  # fmt: skip
"""Values that an argument accepts; all others are refused."""


class Passed(Exception):
    """Raised after all checks have passed."""


def passed(*_, **__):
    raise Passed


@functools.cache
def patched():
    return v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")


@functools.cache
def scored():
    model = small_mla_model(num_hidden_layers=1)
    return v4.patch(model, kv="fp32", precision="reference", score=True)


def cache_of():
    return v4.PagedCache.for_model(patched(), max_batch_size=1, max_cache_len=64)


def call(op, name, value, folder):
    """Call a public function with this value in one argument, and valid values in all others."""
    one = {name: value}
    if op == "patch":
        v4.patch(**{"model": small_mla_model(num_hidden_layers=1), **one})
    elif op == "PagedCache":
        sizes = {"max_batch_size": 1, "max_cache_len": 64}
        v4.PagedCache(**{"config": patched().config, **sizes, **one})
    elif op == "compile_step":
        v4.compile_step(**{"model": patched(), **one})
    elif op == "crop":
        cache_of().crop(value)
    elif op == "forward" and name == "scored":
        scored()(value)
    elif op == "forward":
        cache, ids = cache_of(), torch.tensor([[5, 6, 7]])
        patched()(**{"input_ids": ids, "cache": cache, **one})
    elif op == "generate":
        prompt = {} if name == "inputs_embeds" else {"input_ids": torch.tensor([[5, 6, 7]])}
        patched().generate(**{**prompt, "max_new_tokens": 2, "pad_token_id": 0, **one})
    elif op == "generate_batch":
        patched().generate_batch(**{"inputs": [[5, 6, 7]], **one})
    elif op == "load_quantized":
        v4.load_quantized(**{"path": folder, **one})
    else:
        serve.server(**{"path": str(folder), **one})


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in ACCEPTED.items() for name in names]
)
def test_values_of_any_other_kind_are_refused(op, name, tmp_path, monkeypatch):
    from dsv4_ops.integrations.transformers.loading import quantized

    monkeypatch.setattr(quantized, "check_checkpoint", passed)
    if op in ("generate_batch", "serve"):
        if release(transformers.__version__) < hooks.OLDEST:
            pytest.skip("transformers is refused by name")
        from dsv4_ops.integrations.transformers.batching import manager

        monkeypatch.setattr(manager, "manager_of", passed)
    if op == "serve":
        pytest.importorskip("fastapi", reason="needs the extra serve")
        monkeypatch.setattr("transformers.cli.serve.Serve.__init__", passed)
    found = {kind: outcome(op, name, value, tmp_path) for kind, value in VALUES.items()}
    accepted = {kind for kind, text in found.items() if text is None}
    assert accepted == set(ACCEPTED[op][name].split())


def outcome(op, name, value, folder):
    """Call a function; check the form of its error, and return the text."""
    try:
        call(op, name, value, folder)
    except Passed:
        return None
    except Exception as error:
        text = str(error)
        assert re.fullmatch(rf"({op}|model): [^:]+ must .+, got .+\. .+\.", text, re.DOTALL), text
        return text
    return None


def test_errors_name_what_to_do():
    for wrong, text in (
        ({"inputs": "The sky"}, "input_ids must be a tensor, got a str. Encode a text by"),
        ({"inputs": torch.ones(1, 3)}, "input_ids must be torch.int64 or torch.int32, got torch.f"),
        ({"cache": 7}, "cache must be a PagedCache, or another Cache of transformers, got an int"),
        ({"streamer": 7}, "streamer must have the methods put and end, got an int. Pass a TextStr"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"generate: {text}")):
            patched().generate(**wrong)
