"""Products of a warp, mma.sync m16n8k16 with float32 sums, and the loads of their operands from shared memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32

_NAMES = {BFloat16: "bf16", Float16: "f16"}


def load_matrices(address: Int32, *, transposed: bool = False) -> list[Any]:
    """Four 8 x 8 matrices of 2-byte elements (ldmatrix): lane l names row l % 8 of matrix l / 8, 16 bytes.

    The lane then holds elements 2 (l % 4) and the next of row l / 4 of each; transposed: of its column.
    """
    form = ".trans" if transposed else ""
    return list(
        cute.arch.inline_ptx(
            f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def multiply(sums: list[Any], a: list[Any], b: list[Any], dtype: Any) -> list[Any]:
    """sums + a b: a of four words is 16 x 16, b of two 16 x 8, sums of four floats 16 x 8.

    With g = lane / 4 and c = 2 (lane % 4): sums are (g, c), (g, c + 1), (g + 8, c), (g + 8, c + 1); a's words hold
    columns c and c + 1 of rows g, g + 8, then c + 8 and c + 9 of both; b's words rows c and c + 1, c + 8 and c + 9 of
    column g.
    """
    name = _NAMES[dtype]
    return list(
        cute.arch.inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *sums],
        )
    )


def maximum(a: Float32, b: Float32) -> Float32:
    """The larger of two floats."""
    return cute.arch.inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def exp2(x: Float32) -> Float32:
    """2^x by the hardware (2 ulp); 0 far below."""
    return cute.arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def row_maximum(x: Float32) -> Float32:
    """The largest of the four lanes that hold a row of sums."""
    for distance in (1, 2):
        x = maximum(x, cute.arch.shuffle_sync_bfly(x, distance))
    return x


def row_sum(x: Float32) -> Float32:
    """The sum of the four lanes that hold a row of sums."""
    for distance in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, distance)
    return x
