"""Device-side building blocks that the kernels share: asynchronous copies, vector loads, packed arithmetic."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

# L2 policy of weights that one block reads once: evict first (the constant of CUTLASS's TMA::CacheHintSm90).
EVICT_FIRST = 0x12F0000000000000


def address_of(tensor: cute.Tensor | None) -> Int64 | None:
    """The address of a tensor's first element; None where there is no tensor."""
    return None if tensor is None else tensor.iterator.toint()


def layer_address(weights: cute.Tensor, layer: cute.Tensor | None, layer_bytes: int) -> Int64:
    """The address of the layer that the one-element tensor names; of the weights where there is no stack."""
    first = weights.iterator.toint()
    return first if layer is None else first + Int64(layer[0]) * layer_bytes


def bulk_copy(dst: Int32, src: Int64, num_bytes: int, barrier: Int32, evict_first: bool) -> None:
    """Copies num_bytes (a multiple of 16) from global to shared memory; the bytes complete on the mbarrier."""
    if evict_first:
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
            read_only_args=[dst, src, Int32(num_bytes), barrier, Int64(EVICT_FIRST)],
        )
    else:
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[dst, src, Int32(num_bytes), barrier],
        )


def copy_16(dst: Int32, src: Int64) -> None:
    """cp.async of 16 bytes from global to shared memory, around the L1."""
    cute.arch.inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[dst, src])


def copy_16_if(condition: Int32, dst: Int32, src: Int64) -> None:
    """The same where condition is not negative.

    Predicated: with a branch a copy, the latencies of a thread's copies add up (2,000 cycles for 32).
    """
    cute.arch.inline_ptx(
        "{\n.reg .pred copies;\nsetp.ge.s32 copies, {$r0}, 0;\n"
        "@copies cp.async.cg.shared.global [{$r1}], [{$r2}], 16;\n}",
        read_only_args=[condition, dst, src],
    )


def copy_16_or_zeros_if(condition: Int32, dst: Int32, src: Int64, src_bytes: Int32) -> None:
    """The same where src_bytes is 16; where it is 0, zeros are written and src is not read."""
    cute.arch.inline_ptx(
        "{\n.reg .pred copies;\nsetp.ge.s32 copies, {$r0}, 0;\n"
        "@copies cp.async.cg.shared.global [{$r1}], [{$r2}], 16, {$r3};\n}",
        read_only_args=[condition, dst, src, src_bytes],
    )


def arrive_if(barrier: Int32, condition: Int32) -> None:
    """An arrival on an mbarrier where condition is not 0: a predicated instruction, never a branch.

    A branch between two wgmma groups in flight makes ptxas serialise both (C7513).
    """
    cute.arch.inline_ptx(
        "{\n.reg .pred arrives;\nsetp.ne.b32 arrives, {$r1}, 0;\n"
        "@arrives mbarrier.arrive.shared::cta.b64 _, [{$r0}];\n}",
        read_only_args=[barrier, condition],
    )


def remote_address(address: Int32, block: Int32) -> Int32:
    """The same place in the shared memory of another block of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, block]
    )


def store_remote_v4_f32(address: Int32, values: list[Float32]) -> None:
    """Four floats to the shared memory of another block, at a 16-byte aligned `remote_address`."""
    cute.arch.inline_ptx(
        "st.shared::cluster.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values]
    )


def arrive_remote(barrier: Int32) -> None:
    """An arrival on another block's mbarrier, after which that block sees what this thread stored there."""
    cute.arch.inline_ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[barrier])


def wait_for_cluster(barrier: Int32) -> None:
    """Waits for the first phase of an mbarrier on which other blocks of the cluster arrive."""
    cute.arch.inline_ptx(
        "{\n.reg .pred there;\nAGAIN:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [{$r0}], 0;\n"
        "@there bra DONE;\nbra AGAIN;\nDONE:\n}",
        read_only_args=[barrier],
    )


def load_shared_v4_f32(address: Int32) -> tuple[Float32, Float32, Float32, Float32]:
    """Four floats of shared memory at a 16-byte aligned address."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def load_shared_v4(address: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four 32-bit words of shared memory at a 16-byte aligned address."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[address],
    )


def load_shared_v2(address: Int32) -> tuple[Uint32, Uint32]:
    """Two 32-bit words of shared memory at an 8-byte aligned address."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32, Uint32],
        read_only_args=[address],
    )


def load_shared(address: Int32) -> Int32:
    """One 32-bit word of shared memory."""
    return cute.arch.inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def store_shared(address: Int32, value: Int32) -> None:
    """One 32-bit word to shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def add_shared(address: Int32, value: Int32) -> None:
    """Adds to a word of shared memory, which other threads may add to."""
    cute.arch.inline_ptx("red.shared.add.u32 [{$r0}], {$r1};", read_only_args=[address, value])


def lanes_with_the_same(value: Int32) -> Uint32:
    """A bit for each lane of the warp that has this lane's value; all lanes must be there."""
    return cute.arch.inline_ptx(
        "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;", write_only_types=[Uint32], read_only_args=[value]
    )


def load_global(address: Int64, read_only: bool = True) -> Int32:
    """One 32-bit word of global memory.

    read_only: that no one writes it during the kernel, its wait for another included.
    """
    return cute.arch.inline_ptx(
        f"ld.global{'.nc' if read_only else ''}.b32 {{$w0}}, [{{$r0}}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def load_global_f32(address: Int64, read_only: bool = True) -> Float32:
    """One float of global memory, read_only as load_global has it."""
    return cute.arch.inline_ptx(
        f"ld.global{'.nc' if read_only else ''}.f32 {{$w0}}, [{{$r0}}];",
        write_only_types=[Float32],
        read_only_args=[address],
    )


def store_global(address: Int64, value: Uint32) -> None:
    """One 32-bit word to global memory."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_global_f32(address: Int64, value: Float32) -> None:
    """One float to global memory."""
    cute.arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_global_v2_f32(address: Int64, first: Float32, second: Float32) -> None:
    """Two floats to global memory at an 8-byte aligned address."""
    cute.arch.inline_ptx("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def store_global_if(address: Int64, offset: int, value: Uint32, count: Int32, index: int) -> None:
    """One 32-bit word to global memory at a constant offset, where the constant index is below count.

    Predicated, with the offset in the instruction: an address and a branch a store take six times the instructions.
    """
    cute.arch.inline_ptx(
        f"{{\n.reg .pred stores;\nsetp.gt.s32 stores, {{$r2}}, {index};\n"
        f"@stores st.global.b32 [{{$r0}}+{offset}], {{$r1}};\n}}",
        read_only_args=[address, value, count],
    )


def store_global_v2_f32_if(
    address: Int64, offset: int, first: Float32, second: Float32, count: Int32, index: int
) -> None:
    """The same of two floats, at an 8-byte aligned address."""
    cute.arch.inline_ptx(
        f"{{\n.reg .pred stores;\nsetp.gt.s32 stores, {{$r3}}, {index};\n"
        f"@stores st.global.v2.f32 [{{$r0}}+{offset}], {{{{$r1}}, {{$r2}}}};\n}}",
        read_only_args=[address, first, second, count],
    )


def load_shared_f32(address: Int32) -> Float32:
    """One float of shared memory."""
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def load_shared_v2_f32(address: Int32) -> tuple[Float32, Float32]:
    """Two floats of shared memory at an 8-byte aligned address."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32, Float32], read_only_args=[address]
    )


def store_shared_v2_f32(address: Int32, first: Float32, second: Float32) -> None:
    """Two floats to shared memory at an 8-byte aligned address."""
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def store_shared_f32(address: Int32, value: Float32) -> None:
    """One float to shared memory."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def warp_sum(value: Float32) -> Float32:
    """The sum over the warp's 32 lanes, the same bits on each."""
    for step in range(5):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << step)
    return value


def multiply_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """The products of two pairs of bf16; subnormal operands keep their value."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def min_u16x2(a: Uint32, bound: int) -> Uint32:
    """The smaller of each unsigned 16-bit half and its half of a constant."""
    return cute.arch.inline_ptx(
        # A braced scope: the instruction takes no immediate.
        f"{{\n.reg .b32 bound;\nmov.b32 bound, {bound:#x};\nmin.u16x2 {{$w0}}, {{$r0}}, bound;\n}}",
        write_only_types=[Uint32],
        read_only_args=[a],
    )


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """The larger of each unsigned 16-bit half."""
    return cute.arch.inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def pack_bf16x2(low: Float32, high: Float32) -> Uint32:
    """Two floats, rounded to nearest even, as bf16 halves of a word."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def round_to_bf16(value: Float32) -> Float32:
    """The nearest bf16, ties to even, as a float."""
    return cute.arch.inline_ptx(
        "{\n.reg .b16 zero, rounded;\nmov.b16 zero, 0;\ncvt.rn.bf16.f32 rounded, {$r0};\n"
        "mov.b32 {$w0}, {zero, rounded};\n}",
        write_only_types=[Float32],
        read_only_args=[value],
    )


def byte_twice(word: Uint32, index: int) -> Uint32:
    """Byte `index` of a word in bytes 0 and 2 of the result, zeros between."""
    selector = 0x4040 | index << 8 | index
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[word, Uint32(0), Uint32(selector)],
    )


def permute_bytes(a: Uint32, b: Uint32, selector: Uint32) -> Uint32:
    """The word whose byte i is the byte that nibble i of the selector names: 0 to 3 of a, 4 to 7 of b."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[a, b, selector]
    )


def pack_e4m3x4(a: Float32, b: Float32, c: Float32, d: Float32) -> Uint32:
    """Four floats, rounded to nearest even, as e4m3 bytes, a lowest; magnitudes above 448 become 448, NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\nmov.b32 {$w0}, {low, high};\n}",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
    )


def magnitude_bits(value: Float32) -> Int32:
    """The bits of a float without its sign: they order as the magnitudes do, NaN above all."""
    return cute.arch.inline_ptx("and.b32 {$w0}, {$r0}, 0x7fffffff;", write_only_types=[Int32], read_only_args=[value])


def float_of(bits: Int32) -> Float32:
    """The float of such bits."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def load_global_v4_or_zeros_if(
    condition: Int32, address: Int64, read_only: bool = True
) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Four words of global memory, read_only as load_global has it; zeros, unread, where condition is 0."""
    return cute.arch.inline_ptx(
        "{\n.reg .pred loads;\nsetp.ne.s32 loads, {$r0}, 0;\n"
        "mov.b32 {$w0}, 0;\nmov.b32 {$w1}, 0;\nmov.b32 {$w2}, 0;\nmov.b32 {$w3}, 0;\n"
        f"@loads ld.global{'.nc' if read_only else ''}.v4.b32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}];\n}",
        write_only_types=[Uint32, Uint32, Uint32, Uint32],
        read_only_args=[condition, address],
    )


def store_global_v2(address: Int64, first: Uint32, second: Uint32) -> None:
    """Two words to global memory at an 8-byte aligned address."""
    cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def store_global_byte(address: Int64, value: Int32) -> None:
    """The lowest byte of a word to global memory."""
    cute.arch.inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[address, value])


def load_tensor_memory(address: Int32, columns: int) -> tuple[Float32, ...]:
    """A warp's 32 lanes of some consecutive columns (a power of two up to 128): thread l gets lane l of each.

    The wait stands in the same block, so that no use of a register can be moved before it.
    """
    registers = ", ".join(f"{{$w{column}}}" for column in range(columns))
    return cute.arch.inline_ptx(
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{registers}}}, [{{$r0}}];\ntcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * columns,
        read_only_args=[address],
    )


def fence_after_thread_sync() -> None:
    """Orders tcgen05 instructions that follow after a barrier that was waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def fence_before_thread_sync() -> None:
    """Orders tcgen05 instructions that came before ahead of an arrival that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def silu_times(gate: Float32, up: Float32) -> Float32:
    """silu(gate) * up, with the hardware's exp2 and reciprocal (2 ulp each)."""
    exponential = cute.math.exp2(gate * Float32(-1.4426950408889634), fastmath=True)
    return gate * up * cute.arch.rcp_approx(Float32(1.0) + exponential)
