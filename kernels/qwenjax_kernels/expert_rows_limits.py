"""What the kernels around the experts' matmuls have room for: pure Python, importable without CuTeDSL."""

from __future__ import annotations

MAX_EXPERTS = 512  # of a rank: `sort_rows` keeps counts of every warp in shared memory, 64 KiB
MAX_TOP_K = 32  # of `sum_rows`: a lane each
