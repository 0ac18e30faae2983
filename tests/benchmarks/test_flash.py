"""``python -m benchmarks flash``: every phase, on two CPU processes."""

import pytest
import torch.multiprocessing

pytest.importorskip("transformers", "5.17", reason="needs deepseek_v4")

from tests.helpers import NIGHTLY, nightly
from tests.support.ranks import start_forked

SIZES = ["--layers", "3", "--batches", "2", "--soak", "8", "--contexts", "40", "--prefills", "9"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--gpus", "2"], *nightly("two processes run the same", ["--gpus", "1"])], ids=" ".join
)
def test_every_phase_has_a_row(smoke, more, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.multiprocessing, "spawn", start_forked)
    (tmp_path / "code").mkdir()
    start = "warm" if "1" in more else "cold"
    if start == "warm":
        (tmp_path / "code/kept").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    checked = [] if NIGHTLY else ["--no-check"]
    status, rows = smoke("flash", "--threads", "1", *SIZES, *more, *checked)
    assert status == 0
    parts, starts = ([row[name] for row in rows] for name in ("part", "start"))
    assert starts == [start if part == "start" else None for part in parts]
    expected = ["start", "start", "start", "decode", "draft", "soak", "start", "prefill"]
    assert parts[parts[0] == "check" :] == expected
    assert ("check" in parts) == (NIGHTLY and "2" in more)
    assert all(row["step_ms"] > 0 for row in rows if row["part"] in ("decode", "draft", "prefill"))
    one, two = (row["roofline_ms"] for row in rows if row["roofline_ms"])
    assert one < two, "of twice the tokens"
    (soak,) = (row for row in rows if row["part"] == "soak")
    assert soak["logits_error"] < 0.05
    assert soak["tokens"] > 8
