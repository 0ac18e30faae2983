"""Convert every bf16 value and every e4m3 code by integers, in Triton's interpreter;
test_scripts.py starts this file. It prints how many values were right."""

import torch

from tests.support.every_code import check

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(check("cpu", converts=False, scale_bytes=range(105, 248)))
