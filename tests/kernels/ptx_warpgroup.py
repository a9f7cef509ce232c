"""Hopper's products of a warpgroup and its tensor copies, of `ptx_emulator`, written from the PTX ISA 8.7.

A warp multiplies its own 16 rows when it issues wgmma: waits for groups of products that are left out do not show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.kernels.ptx_tensor_memory import LANES, EmulationError

if TYPE_CHECKING:
    from tests.kernels.ptx_emulator import Instruction, Warp

SWIZZLE_BYTES = 128


@dataclass
class TensorMap:
    """What a tensor map says: `values`, coordinates from the last axis to the first, and the box, likewise, under the
    128-byte swizzle, whose rows these are."""

    values: np.ndarray
    box: tuple[int, ...]

    def read(self, coordinates: tuple[int, ...]) -> np.ndarray:
        """The bytes of a box, a row a line; zeros outside the tensor."""
        first, sizes = coordinates[::-1], self.box[::-1]
        result = np.zeros(sizes, self.values.dtype)
        inside = tuple(
            slice(max(begin, 0), min(begin + size, bound))
            for begin, size, bound in zip(first, sizes, self.values.shape, strict=True)
        )
        target = tuple(slice(part.start - begin, part.stop - begin) for part, begin in zip(inside, first, strict=True))
        if all(part.stop > part.start for part in inside):
            result[target] = self.values[inside]
        return result.view(np.uint8).reshape(-1, SWIZZLE_BYTES)


def swizzled(address: np.ndarray) -> np.ndarray:
    """Addresses under the 128-byte swizzle."""
    return address ^ (address >> 7 & 7) << 4


class WarpgroupProducts:
    """Instructions of a block, which gives the rest."""

    addresses: Callable[..., np.ndarray]
    read: Callable[..., np.ndarray]
    write: Callable[..., None]
    words: Callable[..., list[np.ndarray]]
    shared_at: Callable[[int, int], np.ndarray]
    barrier: Callable[[int], Any]
    one_lane: Callable[[np.ndarray], int]
    shared: np.ndarray
    copies: list[Callable[[], None]]
    maps: list[TensorMap]

    def do_cvta(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        self.write(warp, instruction.operands[0], self.read(warp, instruction.operands[1], "u64"), lanes)

    def tensor_copy(self, warp: Warp, instruction: Instruction, lanes: np.ndarray) -> None:
        """cp.async.bulk.tensor: a box to shared memory, which completes on an mbarrier."""
        lane = self.one_lane(lanes)
        target, barrier = (int(self.addresses(warp, instruction.operands[index])[lane]) for index in (0, 2))
        place, _, listed = instruction.operands[1].strip("[]").partition(",")
        coordinates = tuple(int(self.read(warp, part.strip(), "s32")[lane]) for part in listed.strip(" {}").split(","))
        source = self.maps[int(self.read(warp, place.strip(), "u64")[lane]) - 1]
        if target % SWIZZLE_BYTES or len(coordinates) != len(source.box):
            raise EmulationError(f"a copy of {source.box} from {coordinates} to {target:#x}")
        rows, arrival = source.read(coordinates), self.barrier(barrier)
        self.shared_at(target, rows.size)

        def finish() -> None:
            self.shared[swizzled(np.arange(target, target + rows.size))] = rows.ravel()
            arrival.bytes -= rows.size
            arrival.settle()

        self.copies.append(finish)

    def do_wgmma(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """D (+)= A B of m64nNk16, operands under the 128-byte swizzle."""
        if parts[1] != "mma_async":
            return
        columns = int(parts[4].partition("n")[2].partition("k")[0])
        dtype = ml_dtypes.bfloat16 if parts[-1] == "bf16" else np.float16
        targets = [part.strip() for part in instruction.operands[0].strip("{}").split(",")]
        if instruction.operands[1].startswith("{"):
            # Words of rows g and g + 8, columns c and c + 1, then c + 8 and c + 9, of lane 4 g + c / 2.
            words = np.stack(self.words(warp, instruction.operands[1], "u32"))
            blocks = words.view(dtype).astype(np.float32).reshape(2, 2, 8, 8)  # half of k, half of rows
            a = np.concatenate([np.concatenate(list(half)) for half in blocks], axis=1)
            b_transposed = self.read(warp, instruction.operands[6], "u32")[0]
        else:
            start, _, stride = self.operand_at(warp, instruction.operands[1])
            row, k = np.meshgrid(warp.index % 4 * 16 + np.arange(16), np.arange(16), indexing="ij")
            a = self.elements(start + row // 8 * stride + row % 8 * SWIZZLE_BYTES + k * 2, dtype)
            assert not self.read(warp, instruction.operands[6], "u32")[0]
            b_transposed = self.read(warp, instruction.operands[7], "u32")[0]
        start, leading, stride = self.operand_at(warp, instruction.operands[2])
        n, k = np.meshgrid(np.arange(columns), np.arange(16), indexing="ij")
        if b_transposed:  # N is contiguous, 64 of it a line
            place = start + n // 64 * leading + k // 8 * stride + k % 8 * SWIZZLE_BYTES + n % 64 * 2
        else:
            place = start + n // 8 * stride + n % 8 * SWIZZLE_BYTES + k * 2
        b = self.elements(place, dtype)
        accumulates = bool(self.read(warp, instruction.operands[3], "pred")[0])
        with np.errstate(all="ignore"):
            # Registers: of each eight columns, 2 (lane % 4) and the next of row lane / 4, then of that + 8.
            products = (a @ b.T).reshape(2, 8, columns // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(-1, LANES)
            for target, product in zip(targets, products, strict=True):
                before = self.read(warp, target, "f32") if accumulates else np.float32(0)
                self.write(warp, target, np.ascontiguousarray(product + before), lanes)

    def operand_at(self, warp: Warp, operand: str) -> tuple[int, int, int]:
        """Start, leading and stride offset, in bytes, of a descriptor in shared memory."""
        words = self.read(warp, operand, "u64")
        assert (words == words[0]).all()
        word = int(words[0])
        assert word >> 62 == 1, f"{word:#x} is not of the 128-byte swizzle"
        return (word & 0x3FFF) << 4, (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4

    def elements(self, address: np.ndarray, dtype: Any) -> np.ndarray:
        place = swizzled(address)
        return self.shared.view(dtype)[place // 2].astype(np.float32)
