"""Tensor memory and the tensor instructions of `ptx_emulator`, written from the PTX ISA 8.7, section tcgen05.

Copies of scales, products and commits are queued in the order of their issue; the emulator takes from the queue late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from tests.kernels.ptx_emulator import Instruction, Warp

LANES = 32  # of a warp
TENSOR_LANES, TENSOR_COLUMNS = 128, 512


class EmulationError(RuntimeError):
    """The kernel did what no GPU would take, or hangs."""


class TensorMemory:
    """The tensor memory of a block. The methods named tensor_* are instructions; the block gives the rest."""

    addresses: Callable[..., np.ndarray]
    read: Callable[..., np.ndarray]
    write: Callable[..., None]
    shared_at: Callable[[int, int], np.ndarray]
    barrier: Callable[[int], Any]
    one_lane: Callable[[np.ndarray], int]
    shared: np.ndarray

    def __init__(self) -> None:
        self.tensor = np.full((TENSOR_LANES, TENSOR_COLUMNS), 0xFFFFFFFF, np.uint32)
        self.allocated: tuple[int, int] | None = None
        self.tensor_queue: list[Callable[[], None]] = []

    def do_tcgen05(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        getattr(self, "tensor_" + parts[1].partition("::")[0])(warp, instruction, parts, lanes)

    def tensor_alloc(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        columns = int(self.read(warp, instruction.operands[1], "u32")[0])
        first = min(64, TENSOR_COLUMNS - columns)
        self.allocated = (first, columns)
        address = int(self.addresses(warp, instruction.operands[0])[0])
        self.shared_at(address, 4)[:] = np.asarray([first], np.uint32).view(np.uint8)

    def tensor_dealloc(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        given = tuple(int(self.read(warp, operand, "u32")[0]) for operand in instruction.operands)
        if given != self.allocated or self.tensor_queue:
            raise EmulationError(f"tensor memory {given} given back, allocated {self.allocated}")
        self.allocated = None

    def tensor_relinquish_alloc_permit(
        self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray
    ) -> None:
        """One block runs at a time."""

    def tensor_fence(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """Tensor memory is in order here."""

    def tensor_wait(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """Loads are over at once."""

    def columns(self, first: int, count: int) -> slice:
        assert self.allocated
        begin, size = self.allocated
        if not begin <= first <= begin + size - count:
            raise EmulationError(f"columns {first} to {first + count - 1} are not in tensor memory {self.allocated}")
        return slice(first, first + count)

    def tensor_ld(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """.32x32b: lane l of the warp's quarter of tensor memory to thread l, a register a column."""
        assert "32x32b" in parts, instruction.text
        targets = [part.strip() for part in instruction.operands[0].strip("{}").split(",")]
        address = int(self.addresses(warp, instruction.operands[1])[0])
        lane, column = address >> 16, address & 0xFFFF
        if lane != warp.index % 4 * LANES:
            raise EmulationError(f"warp {warp.index} loads from lane {lane}")
        values = self.tensor[lane : lane + LANES, self.columns(column, len(targets))]
        for index, target in enumerate(targets):
            self.write(warp, target, values[:, index].copy(), lanes)

    def tensor_commit(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        lane = self.one_lane(lanes)
        barrier = self.barrier(int(self.addresses(warp, instruction.operands[0])[lane]))

        def finish() -> None:
            barrier.pending -= 1
            barrier.settle()

        self.tensor_queue.append(finish)

    def tensor_cp(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """.32x128b.warpx4: 16 bytes a lane, in core matrices of 8 lanes, to the four quarters of tensor memory."""
        assert parts[3:5] == ["32x128b", "warpx4"], instruction.text
        lane = self.one_lane(lanes)
        column = int(self.addresses(warp, instruction.operands[0])[lane])
        start, stride, swizzle = descriptor(int(self.read(warp, instruction.operands[1], "u64")[lane]))
        assert swizzle == 0
        place = self.columns(column, 4)

        def finish() -> None:
            for row in range(LANES):
                words = self.shared_at(start + row // 8 * stride + row % 8 * 16, 16).view(np.uint32)
                self.tensor[row::LANES, place] = words

        self.tensor_queue.append(finish)

    def tensor_mma(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """kind::mxf8f6f4.block_scale of one block, K = 32: D[m, n] (+)= sum_k A[m, k] B[n, k] * SFA[m] * SFB[n]."""
        assert parts[2] == "cta_group::1", instruction.text
        lane = self.one_lane(lanes)
        target, scales_a, scales_b = (
            int(self.addresses(warp, instruction.operands[index])[lane]) for index in (0, 4, 5)
        )
        a, b = (descriptor(int(self.read(warp, instruction.operands[index], "u64")[lane])) for index in (1, 2))
        word = int(self.read(warp, instruction.operands[3], "u32")[lane])
        accumulate = bool(self.read(warp, instruction.operands[6], "pred")[lane])
        # Instruction descriptor of .kind::mxf8f6f4: e4m3 both, K-major both, scales UE8M0.
        rows_b, rows_a = (word >> 17 & 0x3F) * 8, (word >> 27 & 3) * 128
        byte_b, byte_a = word >> 4 & 3, word >> 29 & 3
        assert rows_a == 128, hex(word)
        assert word & ~(3 << 4 | 0x3F << 17 | 3 << 27 | 3 << 29) == 1 << 23, hex(word)
        place = self.columns(target, rows_b)
        # The two bits above an address choose the byte; the descriptor says the same.
        assert (scales_a >> 30, scales_b >> 30) == (byte_a, byte_b)

        def scales(address: int, rows: int, byte: int) -> np.ndarray:
            words = self.tensor[:, self.columns(address & 0xFFFF, -(-rows // LANES))]
            assert (words[:LANES] == words[LANES : 2 * LANES]).all()
            values = (words[:LANES] >> np.uint32(8 * byte) & np.uint32(0xFF)).T.reshape(-1)[:rows]
            return np.where(values == 255, np.nan, np.exp2(values.astype(np.float64) - 127))

        def finish() -> None:
            left = self.operand(a, rows_a) * scales(scales_a, rows_a, byte_a)[:, None]
            right = self.operand(b, rows_b) * scales(scales_b, rows_b, byte_b)[:, None]
            with np.errstate(all="ignore"):
                product = left @ right.T
                before = self.tensor[:, place].view(np.float32).astype(np.float64) if accumulate else 0.0
                self.tensor[:, place] = (product + before).astype(np.float32).view(np.uint32)

        self.tensor_queue.append(finish)

    def operand(self, where: tuple[int, int, int], rows: int) -> np.ndarray:
        """[rows, 32] e4m3 values of a K-major operand under the 128-byte swizzle."""
        start, stride, swizzle = where
        assert swizzle == 2
        row, k = np.meshgrid(np.arange(rows), np.arange(32), indexing="ij")
        address = start + row // 8 * stride + row % 8 * 128 + k
        address ^= (address >> 7 & 7) << 4
        return self.shared[address].view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def descriptor(word: int) -> tuple[int, int, int]:
    """(start, stride between groups of eight rows, swizzle) of a shared memory descriptor, in bytes."""
    assert word >> 46 & 0x7FFF == 1, hex(word)
    return (word & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4, word >> 61
