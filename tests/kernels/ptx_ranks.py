"""Runs the PTX of a kernel that waits for its peers on the CPU: all blocks of all ranks take turns; see `ptx_emulator`.

Memory is in order here, so that a fence left out does not show (the simulation of the protocol finds it); addresses,
slots, counts, values and waits do, and a wait that never ends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qwenjax_kernels.heap_layout import BASES_WORD, RANK_WORD, RECORD_BYTES, RECORD_WORD, num_words
from tests.kernels.ptx_emulator import (
    EXITED,
    LANES,
    Block,
    EmulationError,
    GlobalMemory,
    Instruction,
    Program,
    Warp,
    parse,
)

TURNS = 200_000  # of one warp, up to 100 instructions each, in one launch


class RankBlock(Block):
    """A block of one rank; it knows atomics, the clock, and accesses with an order and a scope."""

    clock = 0

    def read(self, warp: Warp, operand: str, dtype: str) -> np.ndarray:
        if operand == "%globaltimer":
            RankBlock.clock += 1
            return np.full(LANES, RankBlock.clock, np.uint64)
        return super().read(warp, operand, dtype)

    def next_pc(self, warp: Warp) -> int:
        """Any lanes may go on, since some may wait for what others of their warp send; warp-wide steps need all."""
        places = sorted(set(warp.pcs.tolist()) - {EXITED})
        if len(places) > 1:
            places = [pc for pc in places if ".sync" not in self.program.instructions[pc].name]
            if self.random.random() < 0.2:
                return self.random.choice(places)
        return places[0]

    def do_mul(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        if parts[1] != "hi":
            super().do_mul(warp, instruction, parts, lanes)
            return
        a, b = (self.read(warp, operand, instruction.dtype) for operand in instruction.operands[1:3])
        products = [int(x) * int(y) >> 8 * a.dtype.itemsize for x, y in zip(a, b, strict=True)]
        self.write(warp, instruction.operands[0], np.asarray(products, a.dtype), lanes)

    def do_cvt(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        source = instruction.operands[-1]
        if parts[-2:] == ["f16x2", "e4m3x2"]:
            pair = self.read(warp, source, "b16").view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
            self.write(warp, instruction.operands[0], pair.view(np.uint32), lanes)
        elif parts[-2:] == ["f32", "f16"]:
            self.write(
                warp, instruction.operands[0], self.read(warp, source, "b16").view(np.float16).astype(np.float32), lanes
            )
        else:
            super().do_cvt(warp, instruction, parts, lanes)

    def do_rsqrt(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        value = np.float32(1) / np.sqrt(self.read(warp, instruction.operands[1], "f32"))
        self.write(warp, instruction.operands[0], value, lanes)

    def do_trap(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        raise EmulationError("the kernel gave up")

    def do_atom(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        values = self.read(warp, instruction.operands[-1], instruction.dtype)
        before = values.copy()
        addresses = self.addresses(warp, instruction.operands[-2])
        for lane in np.flatnonzero(lanes):
            place = self.bytes_at("global", int(addresses[lane]), values.dtype.itemsize)
            before[lane] = place.view(values.dtype)[0]
            after = values[lane] if "exch" in parts else before[lane] + values[lane]
            place[:] = np.frombuffer(after.tobytes(), np.uint8)
        self.write(warp, instruction.operands[0], before, lanes)


def program_of(ptx: str) -> Program:
    """The kernel, without the orders and scopes of its accesses; its parameters are 8 bytes each."""
    plain = re.sub(r"\b(ld|st|atom|red)(\.relaxed|\.acquire|\.release|\.acq_rel)\.(sys|gpu)", r"\1", ptx)
    program = parse(plain)
    program.parameters += [(name, 8, 8) for name in re.findall(r"\.param \.[ub]64 (\w+)", plain)]
    return program


class EmulatedRanks:
    """Heaps of zeros, one a rank, their failure records and tables; `put` adds an operand."""

    def __init__(self, ranks: int, heap_bytes: int) -> None:
        self.ranks = ranks
        self.memory = GlobalMemory([])
        self.heaps = [np.zeros(heap_bytes, np.uint8) for _ in range(ranks)]
        self.records = [np.zeros(RECORD_BYTES, np.uint8) for _ in range(ranks)]
        heaps = [self.put(heap) for heap in self.heaps]
        self.tables = []
        for rank in range(ranks):
            table = np.zeros(num_words(ranks, False), np.uint32)
            table[RANK_WORD] = rank
            addresses = {RECORD_WORD: self.put(self.records[rank])}
            addresses |= {BASES_WORD + 2 * peer: heaps[peer] for peer in range(ranks)}
            for word, address in addresses.items():
                table[word], table[word + 1] = address & 0xFFFFFFFF, address >> 32
            self.tables.append(self.put(table))

    def put(self, values: np.ndarray) -> int:
        """The address of an array, which kernels write to."""
        self.memory.starts.append(0)
        self.memory.buffers.append(values.reshape(-1).view(np.uint8))
        return self.memory.address(len(self.memory.buffers) - 1)

    def launch(self, ptx: str, grid: int, arguments: Sequence[Sequence[int]], seed: int) -> None:
        """Runs a kernel on all ranks at once; arguments: of each rank. Some ranks come late, by chance."""
        program = program_of(ptx)
        draw = random.Random(seed)
        blocks: list[tuple[float, Any]] = []
        for values in arguments:
            speed = draw.choice((1.0, 0.2))
            named = {
                name: value.to_bytes(8, "little") for (name, *_), value in zip(program.parameters, values, strict=True)
            }
            for index in range(grid):
                block = RankBlock(program, self.memory, named, (index, 0), draw.randrange(1 << 30))
                blocks.append((speed, block))
        for _ in range(TURNS):
            running = [(speed, block) for speed, block in blocks if not all(warp.done for warp in block.warps)]
            if not running:
                return
            (block,) = draw.choices([block for _, block in running], [speed for speed, _ in running])
            block.release_barrier()
            able = [warp for warp in block.warps if block.can_run(warp)]
            if able:
                block.run_warp(draw.choice(able))
        raise EmulationError("some blocks still wait")
