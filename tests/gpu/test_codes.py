"""Every bf16 value and every e4m3 code, converted by the GPU and by integer operations."""

import pytest
import torch

from tests.support.every_code import check


@pytest.mark.parametrize("converts", [True, False])
def test_every_value_and_every_code(converts):
    if converts and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not convert e4m3 codes")
    assert check("cuda", converts, range(256)) == 65536 + 6 * 127 + 256 + 256 * 256
