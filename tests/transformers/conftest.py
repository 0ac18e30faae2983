"""What tests of several files watch."""

import pytest

from dsv4_ops.integrations import transformers as v4


@pytest.fixture
def caches(monkeypatch):
    """All caches that are made."""
    made, before = [], v4.PagedCache.__init__

    def init(self, *args, **sizes):
        before(self, *args, **sizes)
        made.append(self)

    monkeypatch.setattr(v4.PagedCache, "__init__", init)
    return made
