"""Device functions that several stems use, and the names of Triton that moved.

The parameters of a kernel that is launched are flat, because launches and Inductor's analysis of
them are. Behind it arguments travel in groups, tuples that mean the same everywhere:

- ``cache``: a paged cache, the stride of its blocks, how many blocks it has, and the stride of its
  rows if they are plain;
- ``table``: a block table, the stride of its requests, that of its columns, and how many columns;
- ``slots``: a slot mapping, its stride and its length;
- ``requests``: positions, their stride, request indices, their stride, and the number of requests;
- ``angles``: the table of cosines and sines, the strides of its rows and columns, and its rows;
- ``FORMAT``: of a quantised row: rows of a block, head dimension, coded values, values of a scale,
  bytes of a row's values, bytes of its scales (none: a plain row), and whether scales are fp32;
- ``WINDOW``, ``FINISH``, ``THREADS`` and ``SAVE`` of the compressors: see ``kernels/compressor``.

Groups of constants are passed to the launch as tuples: neither it nor the analysis reads them.

A group of tensors may hold fewer: what a function reads of it stands in its first lines.
"""
