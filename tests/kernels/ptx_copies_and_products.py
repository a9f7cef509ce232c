"""Copies to shared memory, and a warp's matrices and products, of `ptx_emulator`, written from the PTX ISA 8.7.

A copy is queued when it is issued (cp.async: with the arrival that follows it), and finished by the emulator in any
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tests.kernels.ptx_tensor_memory import LANES, EmulationError

if TYPE_CHECKING:
    from tests.kernels.ptx_emulator import GlobalMemory, Instruction, Warp


class CopiesAndProducts:
    """Instructions of a block, which gives the rest."""

    addresses: Callable[..., np.ndarray]
    read: Callable[..., np.ndarray]
    write: Callable[..., None]
    bytes_at: Callable[[str, int, int], np.ndarray]
    shared_at: Callable[[int, int], np.ndarray]
    barrier: Callable[[int], Any]
    one_lane: Callable[[np.ndarray], int]
    tensor_copy: Callable[..., None]
    memory: GlobalMemory
    copies: list[Callable[[], None]]

    def words(self, warp: Warp, operand: str, dtype: str) -> list[np.ndarray]:
        """The registers of a braced list."""
        return [self.read(warp, register.strip(), dtype) for register in operand.strip("{}").split(",")]

    def do_ldmatrix(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        assert "x4" in parts
        addresses = self.addresses(warp, instruction.operands[1])
        rows = np.stack([self.bytes_at("shared", int(address), 16) for address in addresses])
        matrices = rows.view(np.uint16).reshape(4, 8, 8)
        if "trans" in parts:
            matrices = matrices.swapaxes(1, 2)
        words = np.ascontiguousarray(matrices).reshape(4, 64).view(np.uint32)
        for target, word in zip(instruction.operands[0].strip("{}").split(","), words, strict=True):
            self.write(warp, target.strip(), word, lanes)

    def do_mma(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        assert parts[3] == "m16n8k16"
        dtype = ml_dtypes.bfloat16 if "bf16" in parts else np.float16

        def matrix(operand: str, rows: int) -> np.ndarray:
            """Words of lanes as blocks of 8 rows and 8 columns, 2 of these a word."""
            words = np.stack(self.words(warp, operand, "u32"))
            blocks = words.view(dtype).astype(np.float32).reshape(-1, rows // 8, 8, 8)
            return np.concatenate([np.concatenate(list(block)) for block in blocks], axis=1)

        a, b = matrix(instruction.operands[1], 16), matrix(instruction.operands[2], 8)
        sums = np.stack(self.words(warp, instruction.operands[3], "f32")).reshape(2, 2, 8, 4)
        with np.errstate(all="ignore"):
            products = (a @ b.T).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2) + sums
        for target, value in zip(
            instruction.operands[0].strip("{}").split(","), products.reshape(4, LANES), strict=True
        ):
            self.write(warp, target.strip(), np.ascontiguousarray(value), lanes)

    def do_cp(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        if "tensor" in parts:
            self.tensor_copy(warp, instruction, lanes)
            return
        if "cg" in parts:
            targets, sources = (self.addresses(warp, operand) for operand in instruction.operands[:2])
            assert instruction.operands[2:] == ["16"]
            for lane in np.flatnonzero(lanes):
                place = self.bytes_at("shared", int(targets[lane]), 16)
                warp.copying.append((place, self.bytes_at("global", int(sources[lane]), 16)))
            return
        if "noinc" in parts:
            copies, warp.copying = warp.copying, []
            arrivals = [self.barrier(int(address)) for address in self.addresses(warp, instruction.operands[0])[lanes]]

            def finish_all() -> None:
                for place, values in copies:
                    place[:] = values
                for arrival in arrivals:
                    arrival.pending -= 1
                    arrival.settle()

            self.copies.append(finish_all)
            return
        lane = self.one_lane(lanes)
        target, source, barrier = (int(self.addresses(warp, instruction.operands[index])[lane]) for index in (0, 1, 3))
        size = int(self.read(warp, instruction.operands[2], "u32")[lane])
        if target % 16 or source % 16 or size % 16:
            raise EmulationError("a bulk copy that is not aligned to 16 bytes")
        values, place, arrival = self.memory.at(source, size), self.shared_at(target, size), self.barrier(barrier)

        def finish() -> None:
            place[:] = values
            arrival.bytes -= size
            arrival.settle()

        self.copies.append(finish)
