import pytest

pytest.importorskip("transformers", "5.17", reason="needs transformers with deepseek_v4")
