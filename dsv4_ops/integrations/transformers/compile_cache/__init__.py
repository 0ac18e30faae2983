"""Store compiled parts of steps, which later processes load.

Invariants:

- A part is found by a name that covers all that its trace read, except for numbers in tensors
  (``precompiled.environment`` and ``described``). A part runs only if the process can show that a
  new trace would give the same code; otherwise it is compiled again.
- A part that another process compiles for a step is used only if both processes describe the call,
  the settings and the environment alike; it is then stored like any other part.
- A file is written beside its place and then renamed, so a reader sees the old file or the new one.
  Two processes that compile the same part write the same name; the last one wins.
- A file begins with a digest of its content. A damaged file, or a file of other sources or
  versions, costs the time of a compile and nothing else.
- Loading a part runs its code. The default folder is used only if its user alone can write to it;
  a folder or file that a user names is trusted.
- No part is stored for a step that cannot be described, such as a step with a user's hooks or with
  another backend than Inductor. Each process compiles this step.
- Kernels stay in the folders of Inductor and Triton. A marker beside Triton's kernels says that the
  kernels of a size are there; if kernels are missing, a step only takes longer.
"""
