"""The progress bar of a compilation."""

import io
import sys
from shutil import rmtree

from transformers.utils import logging

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.compile_cache import precompiled
from dsv4_ops.testing.models import small_mla_model
from tests.support.hf_models import Engine, first_step, new_cache, text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_the_parts(monkeypatch):
    """The bar counts finished parts: before the layers, the layers, after them, and the head."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")
    step = v4.compile_step(model, mode="regional", dynamic=True, backend="eager")
    engine = Engine(model, new_cache(model), text())
    step(engine.batch({0: 1}), engine.cache)
    shown = terminal.getvalue()
    assert "compile decode_step" in shown
    assert f"3/{len(step.parts)}" in shown
    assert "head" in shown
    before = len(shown)
    step(engine.batch({0: 1}), engine.cache)
    assert len(terminal.getvalue()) == before  # nothing is compiled


def test_a_log_has_one_line(monkeypatch, tmp_path):
    """A terminal shows a bar, other streams a line. Both are off if transformers' bars are off, and
    there is no line if all parts are loaded."""
    monkeypatch.setenv("DSV4_OPS_CACHE", str(tmp_path))
    monkeypatch.setattr(precompiled, "environment", lambda settings: "here")
    model = v4.patch(small_mla_model(num_hidden_layers=1), kv="fp32", precision="reference")
    batch, cache = first_step(model)

    def shown(stderr=io.StringIO):
        monkeypatch.setattr(sys, "stderr", stderr())
        step = v4.compile_step(model, mode="regional", dynamic=True, backend="eager")
        for _ in range(2):
            cache.reset()
            step(batch, cache)
        return sys.stderr.getvalue(), step

    logging.disable_progress_bar()
    try:
        assert shown()[0] == ""
        rmtree(tmp_path)
        assert shown(Terminal)[0] == ""
        rmtree(tmp_path)
    finally:
        logging.enable_progress_bar()
    line, step = shown()
    assert line == (
        "dsv4_ops: compiling decode_step in 4 parts: up to a minute on a GPU, several on a CPU; "
        f"kept in {tmp_path}\n"
    )
    assert repr(step) == (
        "CompiledStep(decode_step, 'regional', all sizes, parts: metadata, "
        f"DeepseekV3MLP, norm, head, kept in '{tmp_path}')"
    )
    assert shown()[0] == ""
    model.model.layers[0].register_forward_hook(lambda *_: None)  # a user's code is not described
    assert shown()[0].endswith("on a CPU; not kept\n")
