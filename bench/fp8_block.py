"""A grouped matmul of FP8 weights with a scale per 128 x 128, in Triton: a peer for the benchmarks of the experts.

DeepSeek-V3's format (arXiv:2412.19437, section 3.3): e4m3 weights with a float32 scale per 128 x 128, e4m3 rows with
one per 128. Each product over 128 of k is scaled and added in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def _grouped(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    weights,
    weight_scales,
    out,
    rows_each,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = group * rows_each + tl.arange(0, ROWS)
    inside = tl.arange(0, ROWS) < rows_each
    k = tl.arange(0, 128)
    total = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for block in range(K // 128):
        w = tl.load(weights + group * (N * K) + n[:, None] * K + (block * 128 + k)[None, :])
        rows = tl.load(x + row[None, :] * K + (block * 128 + k)[:, None], mask=inside[None, :], other=0.0)
        w_scale = tl.load(weight_scales + (group * (N // 128) + n // 128) * (K // 128) + block)
        x_scale = tl.load(x_scales + row * (K // 128) + block, mask=inside, other=0.0)
        total += tl.dot(w, rows) * w_scale[:, None] * x_scale[None, :]
    tl.store(out + row[None, :] * N + n[:, None], total.to(tl.bfloat16), mask=inside[None, :])


def grouped_matmul(
    x: Any, x_scales: Any, weights: Any, weight_scales: Any, out: Any, block_n: int = 64, stages: int = 4
) -> None:
    """out[r] = weights[group of r] @ x[r], every group with as many rows, 16 at most.

    x: e4m3 [rows, k], x_scales: float32 [rows, k / 128]; weights: e4m3 [groups, n, k], weight_scales: float32 [groups,
    n / 128, k / 128]; out: bf16 [rows, n].
    """
    groups, n, k = weights.shape
    rows_each = x.shape[0] // groups
    assert rows_each <= 16
    _grouped[(n // block_n, groups)](
        x, x_scales, weights, weight_scales, out, rows_each, N=n, K=k, BLOCK_N=block_n, ROWS=16, num_stages=stages
    )


def reference(x: Any, x_scales: Any, weights: Any, weight_scales: Any) -> Any:
    """The same in float32, [rows, n]."""
    groups, n, k = weights.shape
    w = weights.float().view(groups, n // BLOCK, BLOCK, k // BLOCK, BLOCK) * weight_scales[:, :, None, :, None]
    rows = x.float().view(-1, k // BLOCK, BLOCK) * x_scales[:, :, None]
    return torch.einsum("grk,gnk->grn", rows.view(groups, -1, k), w.view(groups, n, k)).reshape(-1, n)
