"""What the prefill attention kernel takes: pure Python, importable without CuTeDSL."""

from __future__ import annotations

BLOCK_ROWS = 128  # query tokens of one query head that a block takes
TILE_KEYS = 128
HEAD_DIM = 128
PAGE_SIZES = (16, 32, 64, 128, 256)
