"""torch-tensorrt drops what a custom op writes to an input, without an error.

    python torch_tensorrt_lost_write.py     # needs a GPU and TensorRT

The trailing copy_ of a functionalized mutation has no users, and the lowering pass
remove_num_users_is_0_nodes erases every node without users.
"""

import torch
import torch_tensorrt


@torch.library.custom_op("repro::insert", mutates_args=("cache",))
def insert(cache: torch.Tensor, rows: torch.Tensor) -> None:
    cache[: rows.shape[0]] = rows


class Step(torch.nn.Module):
    def forward(self, rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        made = torch.relu(rows * 2)
        insert(cache, made)
        return made + 1


step, rows = Step().cuda(), torch.ones(3, 8, device="cuda")
for frontend in ("dynamo", "torch_compile"):
    cache = torch.zeros(4, 8, device="cuda")
    compiled = torch_tensorrt.compile(step, ir=frontend, inputs=[rows, cache], min_block_size=1)
    compiled(rows, cache)
    print(f"ir={frontend!r}: cache written: {bool(cache.any())}")  # False, expected True
