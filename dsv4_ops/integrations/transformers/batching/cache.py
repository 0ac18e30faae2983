"""Let Hugging Face's scheduler use a ``PagedCache``."""

from __future__ import annotations

from typing import Any

from dsv4_ops.integrations.transformers.cache.paged_cache import PagedCache


class BatchCache:
    """A ``PagedCache`` with the interface that Hugging Face's continuous batching expects.

    A request owns a row and blocks of the ``PagedCache``. Hugging Face asks at which index to write
    each token; this class returns the row of the token. Requests do not share a prefix, because
    every row has its own rings of window keys and states. A request that loses its blocks runs its
    prompt again, because no block moves to host memory.

    Args:
        paged: The cache, whose rows share blocks.
        max_batch_tokens: Maximum tokens of a step.

    Attributes:
        was_empty: Whether the cache was empty at any time since ``BatchSteps`` set this to False.
    """

    use_prefix_sharing = allow_block_sharing = False
    max_blocks_per_request = max_decode_fast_path_length = 0  # so that no block table is made
    read_cache_limit, max_tokens_read = 0, 1  # steps read through block tables, not an index
    bytes_per_sector = 1 << 62  # so large that no block fits into host memory
    index = 0
    write_trash_index = read_trash_index = -1  # padding has no row

    def __init__(self, paged: PagedCache, max_batch_tokens: int) -> None:
        self.paged, self.max_batch_tokens = paged, max_batch_tokens
        self.num_blocks, self.device = paged.num_blocks, paged.device
        self.tokens_per_page = paged.spec.block_tokens
        self.block_table: dict[str, list[int]] = {}
        self.pool, self.cache_allocators = self, {"full_attention": self}
        self.was_empty = True

    # Scheduler

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Give a request a row, and blocks for its next tokens. Return False if the cache is too
        full or too small."""
        total, request = state.current_len() + request_len, state.request_id
        known = request in self.paged.requests
        if total > self.paged.max_cache_len:
            return False
        if self.paged.lacking_blocks(request, total) > self.paged.num_free_blocks:
            return False
        if not known and len(self.paged.requests) == self.paged.max_batch_size:
            return False
        if not dry_run:
            (self.paged.reserve if known else self.paged.add)(request, total)
        return True

    def compute_free_capacity(self) -> float:
        """Return the fraction of blocks that are free."""
        return self.paged.num_free_blocks / self.num_blocks

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Release a request's row and blocks; raise if steps dropped tokens."""
        if request_id in self.paged.requests:
            self.paged.free(request_id)
            self.was_empty |= not self.paged.requests
            self.paged.raise_if_dropped()

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Release all rows and blocks."""
        for request in self.paged.requests:
            self.paged.free(request)
        self.was_empty = True

    reset = free_all_requests

    def evict_cached_blocks(self) -> bool:
        """Return False: no block outlives its request."""
        return False

    def try_to_free_sectors(self) -> None:
        """Do nothing: a released block is free at once."""

    def count_new_complete_blocks(self, *_: Any) -> dict[str, int]:
        """Return nothing: no block is shared."""
        return {}

    def mark_complete_blocks(self, *_: Any) -> None:
        """Do nothing: no block is shared."""

    # Offloading, and copies of a request for ``num_return_sequences``

    def needs_new_blocks(self, request_id: str, past: int, query: int) -> int:
        """Return the number of blocks that a request lacks."""
        return self.paged.lacking_blocks(request_id, past + query)

    def count_storable_requests(self, list_blocks_needed: list[dict[str, int]]) -> int:
        """Return the number of requests, counted from the first, that the free blocks can store
        together."""
        free = self.paged.num_free_blocks
        for count, needed in enumerate(list_blocks_needed):
            free -= sum(needed.values())
            if free < 0:
                return count
        return len(list_blocks_needed)

    def prepare_fork_request(self, *_: Any) -> list[str]:
        """Return no copies: Hugging Face then runs the prompt again."""
        return []

    def perform_cache_copy(self, *_: Any) -> None:
        """Do nothing: there are no copies."""

    # Inputs of a step

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Return 0: steps compute their lengths from positions."""
        return 0

    def extend_read_and_write_indices(
        self, request_id: str, past: int, query: int, read_index: Any, write_index: list[list[int]]
    ) -> None:
        """Append the row of each token of a request."""
        write_index[0].extend([self.paged.requests[request_id]] * query)
