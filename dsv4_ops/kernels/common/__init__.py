"""Device functions that several stems use, and the names of Triton that moved.

The parameters of a kernel entry are flat, because launches and Inductor's analysis of them are.
Device functions take groups of arguments: tuples that mean the same everywhere:

- ``cache``: a paged cache, the stride of its blocks, how many blocks it has, and the stride of its
  rows if they are plain;
- ``table``: a block table, the stride of its requests, that of its columns, and how many columns;
- ``slots``: a slot mapping, its stride and its length;
- ``requests``: positions, their stride, request indices, their stride, and the number of requests;
- ``angles``: the table of cosines and sines, the strides of its rows and columns, and its rows;
- ``FORMAT``: a quantised row: rows of a block, head dimension, coded values, values per scale,
  bytes of a row's values, bytes of its scales (0: a plain row), and whether scales are fp32;
- ``WINDOW``, ``FINISH``, ``THREADS`` and ``SAVE`` of the compressors: see ``kernels/compressor``.

A launch gets groups of constants as tuples, which neither it nor the analysis reads.

A group of tensors may hold fewer: a function unpacks what it reads in its first lines.
"""
