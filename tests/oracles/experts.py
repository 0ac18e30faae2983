"""Oracle of the plan of routed experts, in plain Python."""

from collections.abc import Sequence


def expert_plan(
    topk_ids: Sequence[Sequence[int]], *, num_experts: int, block_size: int
) -> tuple[list[int], list[int], list[int]]:
    flat = [expert for row in topk_ids for expert in row]
    most = (len(flat) + min(num_experts, len(flat)) * (block_size - 1)) // block_size
    rows: list[int] = []
    experts: list[int] = []
    for expert in range(num_experts):
        mine = [row for row, wanted in enumerate(flat) if wanted == expert]
        while mine:
            block, mine = mine[:block_size], mine[block_size:]
            rows += block + [-1] * (block_size - len(block))
            experts.append(expert)
    unused = most - len(experts)
    return rows + [-1] * (unused * block_size), experts + [-1] * unused, [len(experts)]
