"""Which request has which row and which blocks: bookkeeping of the host, without tensors."""

from __future__ import annotations

from collections.abc import Hashable

from dsv4_ops.core.refusal import refusal


class OutOfBlocks(RuntimeError):
    """No block or no row is left; nothing was changed."""


class BlockPool:
    """Rows and blocks of a cache.

    Args:
        num_rows: Requests that fit at a time.
        num_blocks: Blocks that all of them share.
        max_blocks: Blocks that a request can have at most.
    """

    def __init__(self, num_rows: int, num_blocks: int, max_blocks: int) -> None:
        self.num_blocks, self.max_blocks = num_blocks, max_blocks
        self.rows: dict[Hashable, int] = {}
        self.blocks: dict[Hashable, list[int]] = {}
        self.free_rows = list(range(num_rows))
        self.free_blocks = list(range(num_blocks - 1, -1, -1))

    def add(self, request: Hashable, num_blocks: int) -> int:
        """A row, and ``num_blocks`` blocks, for a new request."""
        if request in self.rows:
            rule = "be a request that the cache does not have"
            raise refusal(ValueError, "add", "request", rule, repr(request), "Free it first")
        if not self.free_rows:
            rule = f"be one of at most {len(self.rows)} at a time"
            raise refusal(OutOfBlocks, "add", "request", rule, "one more", "Free one first")
        self._check("add", num_blocks, 0)
        self.free_rows.sort()
        self.rows[request] = self.free_rows.pop(0)
        self.blocks[request] = []
        self.reserve(request, num_blocks)
        return self.rows[request]

    def reserve(self, request: Hashable, num_blocks: int) -> list[int]:
        """Give a request as many blocks as it lacks of ``num_blocks``; return all of its blocks."""
        blocks = self.blocks[self.known("reserve", request)]
        self._check("reserve", num_blocks, len(blocks))
        while len(blocks) < num_blocks:
            blocks.append(self.free_blocks.pop())
        return blocks

    def free(self, request: Hashable) -> int:
        """Take row and blocks back; return the row."""
        row = self.rows.pop(self.known("free", request))
        self.free_rows.append(row)
        self.free_blocks += reversed(self.blocks.pop(request))
        return row

    def known(self, op: str, request: Hashable) -> Hashable:
        """``request``, if it has a row."""
        if request not in self.rows:
            rule = "be a request that was added and not freed"
            raise refusal(ValueError, op, "request", rule, repr(request), "Add it first")
        return request

    def _check(self, op: str, num_blocks: int, owned: int) -> None:
        missing = num_blocks - owned
        if num_blocks > self.max_blocks:
            rule = f"need at most the {self.max_blocks} blocks of max_cache_len"
            raise refusal(
                ValueError,
                op,
                "num_tokens",
                rule,
                num_blocks,
                "Make the cache with a larger max_cache_len",
            )
        if missing > len(self.free_blocks):
            advice = "Free a request, or wait for one to end"
            sizes = (len(self.free_blocks), self.num_blocks, missing)
            raise out_of_blocks(op, "num_tokens", *sizes, advice)


def out_of_blocks(
    op: str, argument: str, free: int, blocks: int, missing: int, advice: str
) -> OutOfBlocks:
    """The error for tokens that take more blocks than are free."""
    rule = f"fit into the free blocks, {free} of {blocks}"
    found = f"tokens for {missing} more block{'s' if missing > 1 else ''}"
    return refusal(OutOfBlocks, op, argument, rule, found, advice)
