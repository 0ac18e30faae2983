"""The progress bar of a compile."""

import io
import sys

from transformers.utils import logging

from dsv4_ops.integrations import transformers as v4
from dsv4_ops.integrations.transformers.steps.progress import PartsBar
from dsv4_ops.testing.models import small_mla_model
from tests.support.hf_models import Engine, new_cache, text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_the_parts(monkeypatch):
    """The layer, what comes before and after, and the head: the bar counts those that are done."""
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


def test_a_log_shows_nothing(monkeypatch):
    """Nor does a terminal, where transformers' bars are disabled."""
    monkeypatch.setattr(sys, "stderr", Terminal())

    def bar():
        with PartsBar("decode_step") as bar:
            bar.begin("norm", 2)
            bar.begin("head", 2)
            return not getattr(bar._bar, "disable", True)

    assert bar()
    logging.disable_progress_bar()
    try:
        assert not bar()
    finally:
        logging.enable_progress_bar()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not bar()
