"""Dispatch of rows as MXFP8: half the bytes over the link, rounded while they are pushed and decoded while collected.

What arrives is what `qwenjax_ffi.activations.quantise_activations` makes of the rows for "mxfp8", in bf16, which holds
every such value exactly; a block with NaN or an infinity arrives as NaN. Rounding once more changes nothing, so that
experts whose matmuls take MXFP8 rows compute the same as without. A row in the inbox is its e4m3 elements, then a UE8M0
scale for each 32 of them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32, Int64, Uint32

from qwenjax_kernels import device, mxfp8, vectors
from qwenjax_kernels.block_scaled import MX_BLOCK
from qwenjax_kernels.token_dispatch import TokenDispatch
from qwenjax_kernels.token_exchange_layout import mxfp8_bytes
from qwenjax_kernels.vectors import Words

LANES = MX_BLOCK // 8  # that share a block, 8 elements each


class MXFP8TokenDispatch(TokenDispatch):
    """See TokenDispatch. dtype is BFloat16, hidden a multiple of 32."""

    def __init__(self, *, hidden: int, dtype: Any, **sizes: Any) -> None:
        if dtype is not BFloat16 or hidden % MX_BLOCK:
            raise ValueError(f"rows of {hidden} {dtype.__name__}; MXFP8 rows are made of multiples of 32 BFloat16")
        super().__init__(hidden=hidden, dtype=dtype, sent_bytes=mxfp8_bytes(hidden), **sizes)
        self.name = f"MXFP8 {self.name}"

    def places(self) -> list[Int32]:
        """The vectors of a thread; past the row's end those of its last block once more, of the same bytes."""
        thread, _, _ = cute.arch.thread_idx()
        found = [thread + u * self.threads for u in range(self.thread_vectors)]
        return [cutlass.min(place, self.row_vectors - LANES + thread % LANES) for place in found]

    def encode_row(self, words: Words) -> Words:
        """Two words of elements and one of the scale for each vector."""
        sent: Words = []
        for u in range(self.thread_vectors):
            values = vectors.floats(words[4 * u : 4 * u + 4], BFloat16)
            amax = Int32(0)
            for value in values:
                amax = cutlass.max(amax, device.magnitude_bits(value))
            for distance in (1, 2):
                amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            scale = mxfp8.scale_byte(amax)
            inverse = mxfp8.inverse_scale(scale)
            scaled = [value * inverse for value in values]
            sent += [device.pack_e4m3x4(*scaled[:4]), device.pack_e4m3x4(*scaled[4:]), Uint32(scale)]
        return sent

    def decode_row(self, sent: Words) -> Words:
        words: Words = []
        for u in range(self.thread_vectors):
            low, high, scale = sent[3 * u : 3 * u + 3]
            factor = mxfp8.scale_of(Int32(scale))
            values = vectors.floats([*halves(low), *halves(high)], Float16)
            words += vectors.words_of([value * factor for value in values], BFloat16)
        return words

    def push_row(self, row: Int64, sent: Words) -> None:
        for u, place in enumerate(self.places()):
            low, high, scale = sent[3 * u : 3 * u + 3]
            cute.arch.inline_ptx(
                "st.relaxed.sys.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
                read_only_args=[row + Int64(place) * 8, low, high],
            )
            # All four lanes of a block store its scale, the same byte.
            cute.arch.inline_ptx(
                "st.relaxed.sys.global.b8 [{$r0}], {$r1};",
                read_only_args=[row + self.hidden + Int64(place // LANES), scale],
            )

    def arrived_row(self, row: Int64) -> Words:
        sent: Words = []
        for place in self.places():
            sent += cute.arch.inline_ptx(
                "ld.relaxed.sys.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
                write_only_types=[Uint32, Uint32],
                read_only_args=[row + Int64(place) * 8],
            )
            scale = cute.arch.inline_ptx(
                "ld.relaxed.sys.global.u8 {$w0}, [{$r0}];",
                write_only_types=[Uint32],
                read_only_args=[row + self.hidden + Int64(place // LANES)],
            )
            sent.append(scale)
        return self.decode_row(sent)


def halves(elements: Uint32) -> Words:
    """Four e4m3 elements as float16, two a word; exact."""
    return list(
        cute.arch.inline_ptx(
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
            "cvt.rn.f16x2.e4m3x2 {$w0}, low;\ncvt.rn.f16x2.e4m3x2 {$w1}, high;\n}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[elements],
        )
    )
