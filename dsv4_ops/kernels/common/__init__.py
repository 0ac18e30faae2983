"""Device functions that several ops use, and Triton's names that differ between releases.

The parameters of a kernel are flat, because launches and Inductor's analysis need single arguments.
Device functions take groups of arguments as tuples, which have the same entries everywhere:

- ``cache``: a paged cache, its block stride, its number of blocks and, if its rows are plain (not
  quantised), its row stride;
- ``table``: a block table, its request stride, its column stride and its number of columns;
- ``slots``: a slot mapping, its stride and its length;
- ``requests``: positions, their stride, request indices, their stride and the number of requests;
- ``angles``: the table of cosines and sines, its row stride, its column stride and its number of
  rows;
- ``FORMAT``: the format of rows: rows per block, head dimension, number of coded values, values per
  scale, bytes of values, bytes of scales (0: a plain row), whether scales are fp32, and CONVERTS
  of ``fp8.py``;
- ``WINDOW``, ``FINISH``, ``THREADS`` and ``SAVE``: see ``kernels/compressor/pooling.py``.

In a launch, a group of constants may be a tuple, because neither the launch nor Inductor's analysis
looks into constants.

A function unpacks its groups into names in its first lines. If a function takes a group with fewer
entries, its docstring says which entries.
"""
