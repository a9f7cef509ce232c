"""Vectors of 16 bytes in registers: four 32-bit words, their loads and stores, and the floats in them.

Memory that peers write or read is accessed with .relaxed.sys (never .weak: the compiler may keep a weak load in a
register or the L1); a rank's own operands and results are plain global memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32

Words = list[Any]  # four Uint32
FOUR_WORDS = [Uint32] * 4


def load_shared_memory(address: Int64) -> Words:
    """A vector that a rank wrote before a signal that this thread's block has waited for."""
    return list(
        cute.arch.inline_ptx(
            "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=FOUR_WORDS,
            read_only_args=[address],
        )
    )


def store_shared_memory(address: Int64, words: Words) -> None:
    """A vector to this rank's or a peer's memory; it is visible there after the next signal."""
    cute.arch.inline_ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def store_flagged(first: Int64, second: Int64, words: Words, flag: Uint32) -> None:
    """A vector as twice 16 bytes in which each word lies beside `flag`, in 8 bytes that become visible together."""
    cute.arch.inline_ptx(
        "{\n.reg .b64 a, b;\n"
        "mov.b64 a, {{$r2}, {$r6}};\nmov.b64 b, {{$r3}, {$r6}};\nst.relaxed.sys.global.v2.b64 [{$r0}], {a, b};\n"
        "mov.b64 a, {{$r4}, {$r6}};\nmov.b64 b, {{$r5}, {$r6}};\nst.relaxed.sys.global.v2.b64 [{$r1}], {a, b};\n}",
        read_only_args=[first, second, *words, flag],
    )


def load_flagged(first: Int64, second: Int64) -> tuple[Words, Words]:
    """The words of a flagged vector and the flags beside them."""
    loaded = cute.arch.inline_ptx(
        "{\n.reg .b64 a, b, c, d;\n"
        "ld.relaxed.sys.global.v2.b64 {a, b}, [{$r0}];\nld.relaxed.sys.global.v2.b64 {c, d}, [{$r1}];\n"
        "mov.b64 {{$w0}, {$w4}}, a;\nmov.b64 {{$w1}, {$w5}}, b;\n"
        "mov.b64 {{$w2}, {$w6}}, c;\nmov.b64 {{$w3}, {$w7}}, d;\n}",
        write_only_types=FOUR_WORDS * 2,
        read_only_args=[first, second],
    )
    return list(loaded[:4]), list(loaded[4:])


def select(condition: Any, chosen: Words, other: Words) -> Words:
    """`chosen` where the condition (a Boolean) holds, else `other`, without a branch."""
    return list(
        cute.arch.inline_ptx(
            "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\n"
            + "".join(f"selp.b32 {{$w{i}}}, {{$r{1 + i}}}, {{$r{5 + i}}}, p;\n" for i in range(4))
            + "}",
            write_only_types=FOUR_WORDS,
            read_only_args=[Int32(condition), *chosen, *other],
        )
    )


def load_operand(address: Int64) -> Words:
    """A vector of an operand, or of a result that this thread stored itself, at a 16-byte aligned address."""
    return list(
        cute.arch.inline_ptx(
            "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=FOUR_WORDS,
            read_only_args=[address],
        )
    )


def store_result(address: Int64, words: Words) -> None:
    """A vector of a result at a 16-byte aligned address."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


@cute.jit
def gather_operand(address: Int64, elements: Int32, width: cutlass.Constexpr) -> Words:
    """The first `elements` elements of `width` bytes (2 or 4) at any address that is a multiple of it; then zeros."""
    words = [Uint32(0), Uint32(0), Uint32(0), Uint32(0)]
    for i in cutlass.range_constexpr(16 // width):
        bits = Uint32(0)
        if i < elements:
            if cutlass.const_expr(width == 2):
                bits = cute.arch.inline_ptx(
                    "{\n.reg .b16 h;\nld.global.b16 h, [{$r0}];\nmov.b32 {$w0}, {h, 0};\n}",
                    write_only_types=[Uint32],
                    read_only_args=[address + i * width],
                )
            else:
                bits = cute.arch.inline_ptx(
                    "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address + i * width]
                )
        words[i * width // 4] = words[i * width // 4] | (bits << (8 * (i * width % 4)))
    return words


@cute.jit
def scatter_result(address: Int64, elements: Int32, words: Words, width: cutlass.Constexpr) -> None:
    """Stores the first `elements` elements of `width` bytes (2 or 4) at any address that is a multiple of it."""
    for i in cutlass.range_constexpr(16 // width):
        if i < elements:
            bits = words[i * width // 4] >> (8 * (i * width % 4))
            if cutlass.const_expr(width == 2):
                cute.arch.inline_ptx(
                    "{\n.reg .b16 h, unused;\nmov.b32 {h, unused}, {$r1};\nst.global.b16 [{$r0}], h;\n}",
                    read_only_args=[address + i * width, bits],
                )
            else:
                cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address + i * width, bits])


# Two floats of a word. bf16 is the upper half of a float32.
_UNPACK = {
    BFloat16: "{\n.reg .b32 t;\nshl.b32 t, {$r0}, 16;\nmov.b32 {$w0}, t;\n"
    "and.b32 t, {$r0}, 0xffff0000;\nmov.b32 {$w1}, t;\n}",
    Float16: "{\n.reg .f16 l, h;\nmov.b32 {l, h}, {$r0};\ncvt.f32.f16 {$w0}, l;\ncvt.f32.f16 {$w1}, h;\n}",
}
_PACK = {
    BFloat16: "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
    Float16: "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
}


def floats(words: Words, dtype: Any) -> list[Any]:
    """The elements of a vector as Float32: 8 of a 2-byte type, 4 of float32."""
    if dtype is Float32:
        return [
            cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])
            for word in words
        ]
    pairs = [
        cute.arch.inline_ptx(_UNPACK[dtype], write_only_types=[Float32, Float32], read_only_args=[word])
        for word in words
    ]
    return [value for pair in pairs for value in pair]


def words_of(values: list[Any], dtype: Any) -> Words:
    """The vector of these elements, each rounded to nearest even."""
    if dtype is Float32:
        return [
            cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])
            for value in values
        ]
    return [
        cute.arch.inline_ptx(_PACK[dtype], write_only_types=[Uint32], read_only_args=[low, high])
        for low, high in zip(values[::2], values[1::2], strict=True)
    ]


def rounded(values: list[Any], dtype: Any) -> list[Any]:
    """The elements rounded to dtype, as Float32 again."""
    return values if dtype is Float32 else floats(words_of(values, dtype), dtype)
