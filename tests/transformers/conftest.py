"""Fixtures for several files of tests of models."""

import pytest

from dsv4_ops.integrations import transformers as v4


@pytest.fixture
def caches(monkeypatch):
    """Return a list, to which every new cache is appended."""
    made, before = [], v4.PagedCache.__init__

    def init(self, *args, **sizes):
        before(self, *args, **sizes)
        made.append(self)

    monkeypatch.setattr(v4.PagedCache, "__init__", init)
    return made
