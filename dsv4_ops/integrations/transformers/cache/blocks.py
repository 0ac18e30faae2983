"""Allocate cache rows and blocks to requests, on the host."""

from __future__ import annotations

from collections.abc import Container, Hashable

from dsv4_ops.core.errors import argument_error


class OutOfBlocks(RuntimeError):
    """No row is free, or too few blocks are free; the cache is unchanged."""


def has(requests: Container[Hashable], op: str, request: Hashable) -> bool:
    """Whether ``request`` is in ``requests``; raise if it is not hashable."""
    try:
        return request in requests
    except TypeError as error:  # also raised for a tuple that contains a list
        raise argument_error(
            op,
            "request",
            must="be hashable",
            got=type(request).__name__,
            do="Pass a string, or a number",
            kind=TypeError,
        ) from error


class BlockPool:
    """Free lists of rows and blocks.

    Args:
        num_rows: Maximum number of concurrent requests.
        num_blocks: Number of blocks in the shared pool.
        max_blocks: Maximum blocks per request.
    """

    def __init__(self, num_rows: int, num_blocks: int, max_blocks: int) -> None:
        self.num_blocks, self.max_blocks = num_blocks, max_blocks
        self.rows: dict[Hashable, int] = {}
        self.blocks: dict[Hashable, list[int]] = {}
        self.free_rows = list(range(num_rows))
        self.free_blocks = list(range(num_blocks - 1, -1, -1))

    def add(self, request: Hashable, num_blocks: int) -> int:
        """Give a new request a row and ``num_blocks`` blocks; return the row."""
        if has(self.rows, "add", request):
            raise argument_error(
                "add",
                "request",
                must="be a request that the cache does not have",
                got=repr(request),
                do="Free it first",
            )
        if not self.free_rows:
            raise argument_error(
                "add",
                "request",
                must=f"be one of at most {len(self.rows)} at a time",
                got="one more",
                do="Free one first",
                kind=OutOfBlocks,
            )
        self._check("add", num_blocks, 0)
        self.free_rows.sort()
        self.rows[request] = self.free_rows.pop(0)
        self.blocks[request] = []
        self.reserve(request, num_blocks)
        return self.rows[request]

    def reserve(self, request: Hashable, num_blocks: int) -> list[int]:
        """Grow a request to ``num_blocks`` blocks; return all of its blocks."""
        blocks = self.blocks[self.require("reserve", request)]
        self._check("reserve", num_blocks, len(blocks))
        while len(blocks) < num_blocks:
            blocks.append(self.free_blocks.pop())
        return blocks

    def free(self, request: Hashable) -> int:
        """Return a request's row and blocks to the pool; return the row."""
        row = self.rows.pop(self.require("free", request))
        self.free_rows.append(row)
        self.free_blocks += reversed(self.blocks.pop(request))
        return row

    def require(self, op: str, request: Hashable) -> Hashable:
        """Return ``request``; raise if it has no row."""
        if not has(self.rows, op, request):
            raise argument_error(
                op,
                "request",
                must="be a request that was added and not freed",
                got=repr(request),
                do="Add it first",
            )
        return request

    def _check(self, op: str, num_blocks: int, owned: int) -> None:
        missing = num_blocks - owned
        if num_blocks > self.max_blocks:
            raise argument_error(
                op,
                "num_tokens",
                must=f"need at most the {self.max_blocks} blocks of max_cache_len",
                got=num_blocks,
                do="Make the cache with a larger max_cache_len",
            )
        if missing > len(self.free_blocks):
            advice = "Free a request, or wait for one to end"
            sizes = (len(self.free_blocks), self.num_blocks, missing)
            raise out_of_blocks(op, "num_tokens", *sizes, advice)


def out_of_blocks(
    op: str, argument: str, free: int, blocks: int, missing: int, advice: str
) -> Exception:
    """Return the error for tokens that need more blocks than are free."""
    return argument_error(
        op,
        argument,
        must=f"fit into the free blocks, {free} of {blocks}",
        got=f"tokens for {missing} more block{'s' if missing > 1 else ''}",
        do=advice,
        kind=OutOfBlocks,
    )
