"""Byte layouts of the paged caches: the contract with FlashMLA, DeepGEMM and other engines.

All offsets are defined here. A layout is a frozen dataclass whose ``tag`` names the format. Ops
take the tag and refuse a cache whose shape does not match it, because the attention libraries read
a cache of the wrong layout without complaint.

A page of a ``QuantizedLayout`` holds the data of all its rows, then the scales of all its rows,
then padding up to a multiple of 576 bytes. FlashMLA requires such a page stride.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_ops.core.errors import argument_error, plain_int
from dsv4_ops.core.ints import at_least

PAGE_ALIGNMENT = 576
"""Page sizes of ``QuantizedLayout`` and ``StateLayout`` are multiples of this many bytes."""

CACHE_ALIGNMENT = 16
"""Pages of FP8 and states start at multiples of this many bytes: kernels copy 16 bytes at once."""

KEY_BLOCK = 128
"""In FlashMLA's sparse prefill, the number of columns of the index matrix must be a multiple of
this number."""

INDEX_ALIGNMENT = 4
"""FlashInfer reads this many indices at a time, so index matrices are padded to a multiple of this
many columns."""

FP8_MAX = 448.0
"""Largest finite e4m3fn value."""

SCALE_BIAS = 127
"""UE8M0: byte b is the scale 2^(b - 127)."""

SCALE_FLOOR = 105
"""Scale byte of a block whose amax is 1e-4 or less: 2^-22 * 448 is just above 1e-4."""

ACTIVATION_FLOOR = 85
"""Scale byte of an activation block whose amax is 1e-10 or less: 2^-42 * 448 is just above
1e-10."""

ACTIVATION_BLOCK = 128
"""Number of activation values that share a scale."""

WEIGHT_BLOCK = 128
"""Number of rows, and of columns, of an FP8 weight that share a scale."""

FP4_BLOCK = 32
"""Number of values in a row of an FP4 weight that share a scale."""

TOKEN_ALIGNMENT = 4
"""Scales with a token stride of 1 are padded to a multiple of this many tokens."""


@dataclass(frozen=True)
class Layout(ABC):
    """Base class of the layouts.

    Args:
        block_size: Rows per page. At least 1.
    """

    block_size: int

    def __post_init__(self) -> None:
        at_least(type(self).__name__, 1, block_size=self.block_size)

    @property
    @abstractmethod
    def tag(self) -> str:
        """Name of the format; ops check it."""

    @property
    @abstractmethod
    def data_bytes(self) -> int:
        """Bytes of one row without its scales."""

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one row, padding included."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, scales included."""
        return self.data_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return round_up(self.block_size * self.row_bytes, PAGE_ALIGNMENT)

    def data_offset(self, slot: int) -> int:
        """Return the byte offset of the data of ``slot`` in a dense cache."""
        page, row = divmod(slot, self.block_size)
        return page * self.page_bytes + row * self.data_bytes

    def scale_offset(self, slot: int) -> int:
        """Return the byte offset of the scales of ``slot`` in a dense cache."""
        page, row = divmod(slot, self.block_size)
        scales = self.block_size * self.data_bytes
        return page * self.page_bytes + scales + row * self.scale_bytes

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a cache of ``num_blocks`` pages."""
        return (num_blocks, self.page_bytes)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the cache tensor."""
        return torch.uint8

    def allocate(self, num_blocks: int, device: torch.device | str | None = None) -> Tensor:
        """Allocate a cache of ``num_blocks`` pages, filled with zeros."""
        at_least(f"{type(self).__name__}.allocate", 0, num_blocks=num_blocks)
        with torch.inference_mode(False):  # ops may write to the cache outside inference mode
            return torch.zeros(self.shape(num_blocks), dtype=self.storage_dtype, device=device)


@dataclass(frozen=True)
class QuantizedLayout(Layout):
    """Rows with e4m3 codes and power-of-two scales."""

    @property
    @abstractmethod
    def head_dim(self) -> int:
        """Values per row."""

    @property
    @abstractmethod
    def code_dim(self) -> int:
        """Number of leading values that are stored as e4m3 codes."""

    @property
    @abstractmethod
    def quant_block(self) -> int:
        """Values per scale."""

    float_scales = False
    """Whether scales are stored as fp32."""

    @property
    def num_scales(self) -> int:
        """Scales per row."""
        return self.code_dim // self.quant_block

    @property
    def format(self) -> tuple[int, ...]:
        """The row format that kernels take as ``FORMAT``; see ``dsv4_ops/kernels/common``."""
        values = (self.block_size, self.head_dim, self.code_dim, self.quant_block)
        return (*values, self.data_bytes, self.scale_bytes, self.float_scales)

    def kernel_view(self, k_cache: Tensor) -> Tensor:
        """Return the view [num_blocks, block_size, 1, row_bytes] for FlashMLA (584 bytes per row)
        or DeepGEMM (132). These libraries read only the sizes and the first stride of the view."""
        rows = (k_cache.shape[0], self.block_size, 1, self.row_bytes)
        strides = (k_cache.stride(0), self.row_bytes, self.row_bytes, 1)
        return k_cache.as_strided(rows, strides)


@dataclass(frozen=True)
class MainLayout(QuantizedLayout):
    """Lay out keys of the window, C4 and C128 caches, as FlashMLA reads them.

    A row of 584 bytes has 448 e4m3 codes (NoPE), 64 bf16 values (RoPE), 7 UE8M0 scales and a zero
    byte. Pages of the window and C4 caches have 64 or 256 rows; pages of the C128 cache have 2.
    """

    tag = "v4_fp8"
    head_dim = 512
    code_dim = 448
    quant_block = 64
    data_bytes = 448 + 64 * 2
    scale_bytes = 7 + 1


@dataclass(frozen=True)
class IndexerLayout(QuantizedLayout):
    """Lay out indexer keys: 128 e4m3 codes and one fp32 scale.

    DeepGEMM reads this layout."""

    tag = "v4_indexer_fp8"
    head_dim = 128
    code_dim = 128
    quant_block = 128
    float_scales = True
    data_bytes = 128
    scale_bytes = 4


@dataclass(frozen=True)
class PlainLayout(Layout):
    """Lay out unquantised rows, [num_blocks, block_size, width].

    The reference mode and FlashInfer use this layout.

    Args:
        block_size: Rows per page.
        width: Values per row.
        dtype: torch.bfloat16, torch.float32, or, for dense MLA only, torch.float16.
    """

    width: int = 512
    dtype: torch.dtype = torch.bfloat16
    tag = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("PlainLayout", 1, width=self.width)
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise argument_error(
                "PlainLayout",
                "dtype",
                must="be torch.bfloat16, torch.float16 or torch.float32",
                got=self.dtype,
                do="Pass the dtype of the rows",
                kind=TypeError,
            )

    @property
    def data_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.data_bytes

    @property
    def storage_dtype(self) -> torch.dtype:
        return self.dtype

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size, self.width)


@dataclass(frozen=True)
class MlaLayout(Layout):
    """FP8 rows of dense MLA, [num_blocks, block_size, row_bytes]: the latent, then the RoPE part.

    Rows follow one another without padding. If rows have scales of their own, each row holds its
    scales.
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """Values per row."""

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.row_bytes

    def data_offset(self, slot: int) -> int:
        return slot * self.row_bytes

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.block_size, self.row_bytes)


@dataclass(frozen=True)
class MlaFp8Layout(MlaLayout):
    """Lay out rows of e4m3 codes. Ops take the scale of the cache as an argument.

    Args:
        block_size: Rows per page.
        width: Values per row, a multiple of 16: kv_lora_rank + qk_rope_head_dim.
    """

    width: int = 576
    tag = "mla_fp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("MlaFp8Layout", CACHE_ALIGNMENT, width=self.width)
        if self.width % CACHE_ALIGNMENT != 0:
            raise argument_error(
                "MlaFp8Layout",
                "width",
                must=f"be a multiple of {CACHE_ALIGNMENT}",
                got=plain_int(self.width),
                do="Pad kv_lora_rank or qk_rope_head_dim",
            )

    @property
    def data_bytes(self) -> int:
        return self.width


@dataclass(frozen=True)
class MlaDsFp8Layout(MlaLayout):
    """DeepSeek-V3.2's rows of 656 bytes.

    A row has 512 e4m3 codes, 4 fp32 scales and 64 bf16 RoPE values.
    """

    tag = "mla_ds_fp8"
    width = 576
    kv_lora_rank = 512
    quant_block = 128
    data_bytes = 512 + 64 * 2
    scale_bytes = 4 * 4
    rope_byte = 512 + 4 * 4

    def scale_offset(self, slot: int) -> int:
        return self.data_offset(slot) + self.kv_lora_rank

    def rope_offset(self, slot: int) -> int:
        """Return the byte offset of the RoPE values of ``slot`` in a dense cache."""
        return self.data_offset(slot) + self.rope_byte


MLA_LAYOUTS = (PlainLayout.tag, MlaFp8Layout.tag, MlaDsFp8Layout.tag)
"""Tags of the layouts that dense MLA supports."""


def mla_layout(tag: str, block_size: int, width: int) -> MlaLayout:
    """Return the layout of FP8 rows with ``width`` values."""
    if tag == MlaFp8Layout.tag:
        return MlaFp8Layout(block_size, width)
    return MlaDsFp8Layout(block_size)


@dataclass(frozen=True)
class StateLayout(Layout):
    """Lay out the unfinished windows of a compressor.

    A row has ``width`` fp32 values, [kv | score].

    A page has 4 rows of 2048 values for C4's main compressor, 8 rows of 1024 values for C128's
    compressor, and 4 rows of 512 values for the indexer's compressor.

    Args:
        block_size: Rows (tokens) per page.
        width: Values per row. An overlapping compressor doubles the width of kv and score.
    """

    width: int = 2048
    tag = "v4_state"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("StateLayout", 1, width=self.width)

    @property
    def data_bytes(self) -> int:
        return self.width * 4

    @property
    def storage_dtype(self) -> torch.dtype:
        return torch.float32

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.page_bytes // 4)

    def rows(self, states: Tensor) -> Tensor:
        """Return the view [num_blocks, block_size, width] without the padding of the pages."""
        used = states[:, : self.block_size * self.width]
        return used.view(states.shape[0], self.block_size, self.width)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def combined_width(topk: int, window_size: int) -> int:
    """Return the number of columns of ``combine_topk_swa_indices``."""
    return round_up(topk + window_size, KEY_BLOCK)


def mixed_width(swa_width: int, topk: int, compressed_width: int) -> int:
    """Return the number of columns of ``mixed_sparse_indices``."""
    return swa_width + round_up(max(topk, compressed_width), INDEX_ALIGNMENT)
