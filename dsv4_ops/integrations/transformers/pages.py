"""Which request has which row and which pages: bookkeeping of the host, without tensors."""

from __future__ import annotations

from collections.abc import Hashable

from dsv4_ops.core.refusal import refusal


class OutOfPages(RuntimeError):
    """No page or no row is left; nothing was changed."""


class PagePool:
    """Rows and pages of a cache.

    Args:
        num_rows: Requests that fit at a time.
        num_pages: Pages that all of them share.
        max_blocks: Pages that a request can have at most.
    """

    def __init__(self, num_rows: int, num_pages: int, max_blocks: int) -> None:
        self.num_pages, self.max_blocks = num_pages, max_blocks
        self.rows: dict[Hashable, int] = {}
        self.pages: dict[Hashable, list[int]] = {}
        self.free_rows = list(range(num_rows))
        self.free_pages = list(range(num_pages - 1, -1, -1))

    def add(self, request: Hashable, num_blocks: int) -> int:
        """A row, and ``num_blocks`` pages, for a new request."""
        if request in self.rows:
            rule = "be a request that the cache does not have"
            raise refusal(ValueError, "add", "request", rule, repr(request), "Free it first")
        if not self.free_rows:
            rule = f"be one of at most {len(self.rows)} at a time"
            raise refusal(OutOfPages, "add", "request", rule, "one more", "Free one first")
        self._check("add", num_blocks, 0)
        self.free_rows.sort()
        self.rows[request] = self.free_rows.pop(0)
        self.pages[request] = []
        self.reserve(request, num_blocks)
        return self.rows[request]

    def reserve(self, request: Hashable, num_blocks: int) -> list[int]:
        """Give a request as many pages as it lacks of ``num_blocks``; return all of its pages."""
        pages = self.pages[self.known("reserve", request)]
        self._check("reserve", num_blocks, len(pages))
        while len(pages) < num_blocks:
            pages.append(self.free_pages.pop())
        return pages

    def free(self, request: Hashable) -> int:
        """Take row and pages back; return the row."""
        row = self.rows.pop(self.known("free", request))
        self.free_rows.append(row)
        self.free_pages += reversed(self.pages.pop(request))
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
            rule = f"need at most the {self.max_blocks} pages of max_len"
            raise refusal(
                ValueError,
                op,
                "num_tokens",
                rule,
                num_blocks,
                "Make the cache with a larger max_len",
            )
        if missing > len(self.free_pages):
            advice = "Free a request, or wait for one to end"
            sizes = (len(self.free_pages), self.num_pages, missing)
            raise out_of_pages(op, "num_tokens", *sizes, advice)


def out_of_pages(
    op: str, argument: str, free: int, pages: int, missing: int, advice: str
) -> OutOfPages:
    """The error for tokens that take more pages than are free."""
    rule = f"fit into the free pages, {free} of {pages}"
    found = f"tokens for {missing} more page{'s' if missing > 1 else ''}"
    return refusal(OutOfPages, op, argument, rule, found, advice)
