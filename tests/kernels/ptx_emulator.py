"""Runs a kernel's PTX on the CPU, for kernels whose GPU is not at hand: slow, strict, and written from the PTX ISA.

It knows what the Blackwell kernels of this project, both kernels of attention and those of the experts' rows compile
to: 32-lane warps that diverge and meet again, mbarriers, the copies and warp products of `ptx_copies_and_products`, the
tensor instructions of `ptx_tensor_memory`, and the products and tensor copies of `ptx_warpgroup`. What is asynchronous
on a GPU is so here, but for a warpgroup's products: copies finish in any order, tensor instructions in theirs, and
warps take turns, each at a speed drawn from the seed: a wait left out shows with some seeds, not with all. Memory
begins as NaN bytes.
Wrong addresses, registers never written, misaligned accesses, warp-wide instructions without the whole warp, and
deadlocks are errors.
What it cannot show: how long anything takes, the rounding of the tensor core's sums, orders between memory proxies.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tests.kernels.ptx_copies_and_products import CopiesAndProducts
from tests.kernels.ptx_tensor_memory import LANES, EmulationError, TensorMemory
from tests.kernels.ptx_warpgroup import TensorMap, WarpgroupProducts

SHARED_BASE = 1024
SHARED_BYTES = 227 * 1024
EXITED = 1 << 30
WAIT = re.compile(
    r"\{\s*\.reg\s+\.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\.parity\.shared\.b64 P1, (\[[^\]]*\]), ([^,]*), \d+;"
    r"\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;\s*DONE:\s*\}"
)
DTYPES = {
    "pred": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype("f4"),
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass
class Instruction:
    guard: str | None  # "%p1" or "!%p1"
    name: str
    operands: list[str]
    text: str

    @property
    def dtype(self) -> str:
        return self.name.rsplit(".", 1)[-1]


@dataclass
class Program:
    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: list[tuple[str, int, int]]  # name, alignment, bytes
    threads: int


def split_operands(text: str) -> list[str]:
    """Operands between commas that stand outside braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)]


def parse(ptx: str, kernel: str = "") -> Program:
    """The one kernel of a PTX module, or the one whose name has `kernel` in it."""
    ptx = re.sub(r"//.*", "", ptx)
    (ptx,) = (entry for entry in ptx.split(".entry ")[1:] if kernel in entry.partition("(")[0])
    head, body = re.search(r"(.*?)\n\{(.*)\n\}", ptx, re.S).groups()  # type: ignore[union-attr]
    declared = re.findall(r"\.align (\d+) \.b8 (\w+)\[(\d+)\]", head)
    parameters = [(name, int(alignment), int(size)) for alignment, name, size in declared]
    threads = int(re.search(r"\.reqntid (\d+)", head).group(1))  # type: ignore[union-attr]
    body = WAIT.sub(r"emulated.wait \1, \2;", body)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.split(r";|\n", body):
        statement = line.strip()
        while match := re.match(r"(\$?\w+):\s*", statement):
            labels[match.group(1)] = len(instructions)
            statement = statement[match.end() :]
        statement = re.sub(r"^(\{|\})\s*$", "", statement)
        if not statement or statement.startswith("."):
            continue
        match = re.match(r"(?:@(!?%?\w+)\s+)?([\w.:]+)\s*(.*)", statement, re.S)
        assert match, statement
        guard, name, operands = match.groups()
        instructions.append(Instruction(guard, name, split_operands(operands), statement))
    return Program(instructions, labels, parameters, threads)


@dataclass
class Window:
    """What is there of a buffer that is too large to be made: its bytes from `start`."""

    start: int
    values: np.ndarray


Buffer = np.ndarray | Window


class GlobalMemory:
    """Buffers far apart; an access must lie inside one and be aligned."""

    def __init__(self, buffers: list[Buffer]) -> None:
        windows = [buffer if isinstance(buffer, Window) else Window(0, buffer) for buffer in buffers]
        self.starts = [window.start for window in windows]
        self.buffers = [window.values.reshape(-1).view(np.uint8) for window in windows]

    def address(self, index: int) -> int:
        return (index + 1) << 40

    def at(self, address: int, size: int) -> np.ndarray:
        index, offset = (address >> 40) - 1, address & ((1 << 40) - 1)
        if not 0 <= index < len(self.buffers):
            raise EmulationError(f"{size} bytes at {address:#x} are in no buffer")
        offset -= self.starts[index]
        if not 0 <= offset <= self.buffers[index].size - size:
            raise EmulationError(f"{size} bytes at {address:#x} are outside buffer {index}")
        return self.buffers[index][offset : offset + size]


@dataclass
class Barrier:
    count: int
    pending: int
    bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        if self.pending < 0:
            raise EmulationError("more arrivals at an mbarrier than it waits for")
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Warp:
    index: int
    pcs: np.ndarray = field(default_factory=lambda: np.zeros(LANES, np.int64))
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    at_barrier: tuple[int, int] | None = None
    copying: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # cp.async: places and what comes there

    @property
    def done(self) -> bool:
        return bool((self.pcs == EXITED).all())


class Block(TensorMemory, CopiesAndProducts, WarpgroupProducts):
    """One block of a launch."""

    def __init__(
        self, program: Program, memory: GlobalMemory, arguments: dict[str, bytes], index: tuple[int, int], seed: int
    ) -> None:
        super().__init__()
        self.program, self.memory, self.arguments, self.index = program, memory, arguments, index
        self.shared = np.full(SHARED_BASE + SHARED_BYTES, 0xFF, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.arrived: dict[tuple[int, int], int] = {}  # threads at named barriers that went on
        self.copies: list[Callable[[], None]] = []
        self.maps: list[TensorMap] = []
        self.warps = [Warp(index) for index in range(program.threads // LANES)]
        self.random = random.Random(seed)
        # Of the warps, the tensor core and the copies: some do next to nothing until the others wait for them.
        self.speeds = self.random.choices((1.0, 0.001), k=len(self.warps) + 2)
        self.executed: set[str] = set()

    def run(self) -> None:
        """Until every warp has exited. Raises EmulationError where none can go on."""
        while not all(warp.done for warp in self.warps):
            self.release_barrier()
            able: list[tuple[float, Callable[[], None]]] = [
                (self.speeds[warp.index], partial(self.run_warp, warp)) for warp in self.warps if self.can_run(warp)
            ]
            if self.copies:
                able.append((self.speeds[-1], self.finish_copy))
            if self.tensor_queue:
                able.append((self.speeds[-2], self.finish_tensor_instruction))
            if not able:
                waiting = [
                    f"warp {warp.index}: {self.program.instructions[int(warp.pcs.min())].text}"
                    for warp in self.warps
                    if not warp.done
                ]
                raise EmulationError("deadlock: " + "; ".join(waiting))
            weights, actions = zip(*able, strict=True)
            self.random.choices(actions, weights)[0]()
        if self.copies or self.tensor_queue:
            raise EmulationError("the block ended before its copies and products")
        if self.allocated is not None:
            raise EmulationError("tensor memory was not given back")

    def run_warp(self, warp: Warp) -> None:
        for _ in range(self.random.randint(1, 100)):
            if not self.can_run(warp):
                break
            self.step(warp)

    def finish_copy(self) -> None:
        self.copies.pop(self.random.randrange(len(self.copies)))()

    def finish_tensor_instruction(self) -> None:
        self.tensor_queue.pop(0)()

    def release_barrier(self) -> None:
        for key in {warp.at_barrier for warp in self.warps if warp.at_barrier}:
            there = [warp for warp in self.warps if warp.at_barrier == key]
            if len(there) * LANES + self.arrived.get(key, 0) == key[1]:
                self.arrived.pop(key, None)
                for warp in there:
                    warp.at_barrier = None

    def can_run(self, warp: Warp) -> bool:
        if warp.done or warp.at_barrier:
            return False
        pc = int(warp.pcs.min())
        instruction = self.program.instructions[pc]
        if instruction.name != "emulated.wait":
            return True
        lanes = warp.pcs == pc
        address = self.addresses(warp, instruction.operands[0])[lanes]
        parity = self.read(warp, instruction.operands[1], "u32")[lanes]
        return all(self.barrier(int(a)).phase != p for a, p in zip(address, parity, strict=True))

    # Registers and memory.

    def read(self, warp: Warp, operand: str, dtype: str) -> np.ndarray:
        """An operand of all lanes, as bits of that type."""
        numpy_type = DTYPES[dtype]
        if operand.startswith("{"):
            parts = [
                self.read(warp, part.strip(), "b16" if dtype == "b32" else "b32") for part in operand[1:-1].split(",")
            ]
            shift = 16 if dtype == "b32" else 32
            return (parts[0].astype(numpy_type) | parts[1].astype(numpy_type) << numpy_type.type(shift)).astype(
                numpy_type
            )
        special = {
            "%tid.x": lambda: warp.index * LANES + np.arange(LANES),
            "%laneid": lambda: np.arange(LANES),
            "%ctaid.x": lambda: np.full(LANES, self.index[0]),
            "%ctaid.y": lambda: np.full(LANES, self.index[1]),
            "__dynamic_shmem__0": lambda: np.full(LANES, SHARED_BASE),
        }
        if operand in self.arguments:  # the address of a parameter: tensor maps are numbered
            return np.frombuffer(self.arguments[operand][:8], np.uint64).repeat(LANES)
        if operand in special:
            return special[operand]().astype(numpy_type)
        if re.fullmatch(r"0f[0-9A-F]{8}", operand):
            return np.full(LANES, int(operand[2:], 16), np.uint32).view(np.float32)
        if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", operand) and operand not in warp.registers:
            value = int(operand, 0)
            if dtype == "pred":
                return np.full(LANES, value != 0)
            return (
                np.full(LANES, value & ((1 << 8 * numpy_type.itemsize) - 1), np.uint64)
                .astype(np.dtype(f"u{numpy_type.itemsize}"))
                .view(numpy_type)
            )
        if operand not in warp.registers:
            raise EmulationError(f"{operand} is read before it is written")
        bits = warp.registers[operand]
        if dtype == "pred":
            return bits.astype(bool)
        return bits.astype(np.dtype(f"u{numpy_type.itemsize}")).view(numpy_type)

    def write(self, warp: Warp, operand: str, values: np.ndarray, lanes: np.ndarray) -> None:
        if operand == "_":
            return
        if operand.startswith("{"):
            width = np.uint64(16 if values.dtype.itemsize == 4 else 32)
            bits = values.astype(np.uint64)
            for index, part in enumerate(operand[1:-1].split(",")):
                piece = (bits >> width * np.uint64(index)) & ((np.uint64(1) << width) - np.uint64(1))
                self.write(warp, part.strip(), piece, lanes)
            return
        if values.dtype.kind in "if" and values.dtype != np.uint64:
            values = values.view(np.dtype(f"u{values.dtype.itemsize}"))
        register = warp.registers.setdefault(operand, np.zeros(LANES, np.uint64))
        register[lanes] = values.astype(np.uint64)[lanes]

    def addresses(self, warp: Warp, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        registers = self.read(warp, base, "u64" if base.startswith("%rd") else "u32").astype(np.int64)
        return registers + (int(offset) if offset else 0)

    def bytes_at(self, space: str, address: int, size: int) -> np.ndarray:
        if address % size:
            raise EmulationError(f"{size} bytes at {address:#x} are not aligned")
        return self.memory.at(address, size) if space == "global" else self.shared_at(address, size)

    def shared_at(self, address: int, size: int) -> np.ndarray:
        if not SHARED_BASE <= address <= self.shared.size - size:
            raise EmulationError(f"{size} bytes at {address:#x} are not in shared memory")
        return self.shared[address : address + size]

    def barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise EmulationError(f"no mbarrier at {address:#x}")
        return self.barriers[address]

    # Execution.

    def next_pc(self, warp: Warp) -> int:
        """Where the lanes are that go on: those furthest behind, so that those ahead wait for them to catch up."""
        return int(warp.pcs.min())

    def step(self, warp: Warp) -> None:
        """One instruction, of the lanes at `next_pc`."""
        pc = self.next_pc(warp)
        instruction = self.program.instructions[pc]
        at = warp.pcs == pc
        lanes = at
        if instruction.guard:
            wanted = not instruction.guard.startswith("!")
            lanes = at & (self.read(warp, instruction.guard.lstrip("!"), "pred") == wanted)
        self.executed.add(instruction.name)
        warp.pcs[at] = pc + 1
        if instruction.name in ("bra", "bra.uni"):
            warp.pcs[lanes] = self.program.labels[instruction.operands[0]]
        elif instruction.name == "ret":
            warp.pcs[lanes] = EXITED
        elif lanes.any():
            try:
                self.execute(warp, instruction, lanes)
            except EmulationError as error:
                raise EmulationError(f"{error}, by warp {warp.index} in: {instruction.text}") from None

    def execute(self, warp: Warp, instruction: Instruction, lanes: np.ndarray) -> None:
        parts = instruction.name.split(".")
        operation, operands, dtype = parts[0], instruction.operands, instruction.dtype
        if ".sync" in instruction.name and not lanes.all():
            raise EmulationError(f"only {lanes.sum()} lanes are there")
        handler = getattr(self, "do_" + operation, None)
        if handler:
            handler(warp, instruction, parts, lanes)
        elif operation in BINARY and dtype == "u16x2":
            a, b = (self.read(warp, operand, "u32").view(np.uint16) for operand in operands[1:])
            self.write(warp, operands[0], BINARY[operation](a, b).view(np.uint32), lanes)
        elif operation in BINARY:
            a, b = (self.read(warp, operand, dtype) for operand in operands[1:])
            result = BINARY[operation](a, b)
            self.write(warp, operands[0], np.maximum(result, 0) if "relu" in parts else result, lanes)
        else:
            raise EmulationError("an instruction that is not emulated")

    def one_lane(self, lanes: np.ndarray) -> int:
        if lanes.sum() != 1:
            raise EmulationError(f"issued by {lanes.sum()} lanes")
        return int(np.flatnonzero(lanes)[0])

    def do_mov(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        self.write(warp, instruction.operands[0], self.read(warp, instruction.operands[1], parts[1]), lanes)

    def do_not(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        self.write(warp, instruction.operands[0], ~self.read(warp, instruction.operands[1], parts[1]), lanes)

    def do_neg(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        self.write(warp, instruction.operands[0], -self.read(warp, instruction.operands[1], parts[1]), lanes)

    def do_shl(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        value = self.read(warp, instruction.operands[1], parts[1])
        shift = self.read(warp, instruction.operands[2], "u32").astype(value.dtype)
        self.write(warp, instruction.operands[0], value << shift, lanes)

    def do_shr(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        value = self.read(warp, instruction.operands[1], parts[1])
        shift = self.read(warp, instruction.operands[2], "u32").astype(value.dtype)
        self.write(warp, instruction.operands[0], value >> shift, lanes)

    def do_shf(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        low, high, shift = (self.read(warp, operand, "u32").astype(np.uint64) for operand in instruction.operands[1:4])
        assert parts[1:3] == ["l", "wrap"]
        both = (high << np.uint64(32) | low) << (shift & np.uint64(31))
        self.write(warp, instruction.operands[0], (both >> np.uint64(32)).astype(np.uint32), lanes)

    def do_setp(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        a, b = (self.read(warp, operand, parts[2]) for operand in instruction.operands[1:3])
        self.write(warp, instruction.operands[0], COMPARISONS[parts[1]](a, b), lanes)

    def do_selp(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        a, b = (self.read(warp, operand, parts[1]) for operand in instruction.operands[1:3])
        self.write(
            warp, instruction.operands[0], np.where(self.read(warp, instruction.operands[3], "pred"), a, b), lanes
        )

    def do_mul(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        a, b = (self.read(warp, operand, instruction.dtype) for operand in instruction.operands[1:3])
        if parts[1] == "wide":
            wide = np.dtype(f"{a.dtype.kind}8")
            result = a.astype(wide) * b.astype(wide)
        elif parts[1] == "hi":
            result = (a.astype(np.int64) * b.astype(np.int64) >> 32).astype(np.int32)
        else:
            with np.errstate(all="ignore"):
                result = a * b
        self.write(warp, instruction.operands[0], result, lanes)

    def do_mad(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        a, b, c = (self.read(warp, operand, instruction.dtype) for operand in instruction.operands[1:4])
        self.write(warp, instruction.operands[0], a * b + c, lanes)

    def do_div(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        if instruction.dtype == "f32":
            a, b = (self.read(warp, operand, "f32") for operand in instruction.operands[1:3])
            with np.errstate(all="ignore"):
                self.write(warp, instruction.operands[0], a / b, lanes)
            return
        a, b = (self.read(warp, operand, "s32")[lanes].astype(np.int64) for operand in instruction.operands[1:3])
        if (b == 0).any():
            raise EmulationError("division by zero")
        result = np.zeros(LANES, np.int32)
        result[lanes] = np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        self.write(warp, instruction.operands[0], result, lanes)

    def do_fma(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        a, b, c = (self.read(warp, operand, "f32").astype(np.float64) for operand in instruction.operands[1:4])
        with np.errstate(all="ignore"):
            self.write(warp, instruction.operands[0], (a * b + c).astype(np.float32), lanes)

    def do_popc(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        bits = self.read(warp, instruction.operands[1], "u32")
        self.write(
            warp, instruction.operands[0], np.asarray([int(word).bit_count() for word in bits], np.uint32), lanes
        )

    def do_match(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        value = self.read(warp, instruction.operands[1], "u32")
        masks = (value[:, None] == value[None, :]) @ (np.uint64(1) << np.arange(LANES, dtype=np.uint64))
        self.write(warp, instruction.operands[0], masks.astype(np.uint32), lanes)

    def do_ex2(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            self.write(warp, instruction.operands[0], np.exp2(self.read(warp, instruction.operands[1], "f32")), lanes)

    def do_rsqrt(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            value = np.float32(1) / np.sqrt(self.read(warp, instruction.operands[1], "f32"))
        self.write(warp, instruction.operands[0], value, lanes)

    def do_rcp(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            value = np.float32(1) / self.read(warp, instruction.operands[1], "f32")
        self.write(warp, instruction.operands[0], value, lanes)

    def do_cvt(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        operands = instruction.operands
        with np.errstate(all="ignore"):
            if "e4m3x2" in parts:
                high, low = (
                    np.clip(self.read(warp, operand, "f32"), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
                    for operand in operands[1:3]
                )
                result = high.astype(np.uint16) << np.uint16(8) | low
            elif "bf16x2" in parts or "f16x2" in parts:
                half = ml_dtypes.bfloat16 if "bf16x2" in parts else np.float16
                high, low = (self.read(warp, operand, "f32").astype(half).view(np.uint16) for operand in operands[1:3])
                result = high.astype(np.uint32) << np.uint32(16) | low
            elif "bf16" in parts:
                result = self.read(warp, operands[1], "f32").astype(ml_dtypes.bfloat16).view(np.uint16)
            else:
                result = self.read(warp, operands[1], parts[2]).astype(DTYPES[parts[1]])
        self.write(warp, operands[0], result, lanes)

    def do_prmt(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        a, b, selector = (self.read(warp, operand, "u32") for operand in instruction.operands[1:4])
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros(LANES, np.uint32)
        for byte in range(4):
            nibble = selector >> np.uint32(4 * byte) & np.uint32(15)
            if (nibble[lanes] > 7).any():
                raise EmulationError("sign modes of prmt are not emulated")
            taken = both >> nibble.astype(np.uint64) * np.uint64(8) & np.uint64(0xFF)
            result |= taken.astype(np.uint32) << np.uint32(8 * byte)
        self.write(warp, instruction.operands[0], result, lanes)

    def do_shfl(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        value = self.read(warp, instruction.operands[1], "u32")
        by = self.read(warp, instruction.operands[2], "s32")
        lane = np.arange(LANES)
        source = {"up": np.where(lane >= by, lane - by, lane), "bfly": lane ^ by, "idx": by % LANES}[parts[2]]
        self.write(warp, instruction.operands[0], value[source], lanes)

    def do_redux(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        value = self.read(warp, instruction.operands[1], instruction.dtype)
        result = {"max": np.max, "min": np.min}[parts[2]](value)
        self.write(warp, instruction.operands[0], np.full(LANES, result, value.dtype), lanes)

    def do_vote(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        bits = int(sum(1 << lane for lane in np.flatnonzero(self.read(warp, instruction.operands[1], "pred"))))
        self.write(warp, instruction.operands[0], np.full(LANES, bits, np.uint32), lanes)

    def do_elect(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        lane, predicate = instruction.operands[0].split("|")
        self.write(warp, lane, np.zeros(LANES, np.uint32), lanes)
        self.write(warp, predicate, np.arange(LANES) == 0, lanes)

    def do_bar(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        if parts[1] == "warp":
            return
        numbers = [int(self.read(warp, operand, "u32")[0]) for operand in instruction.operands]
        key = (numbers[0], numbers[1] if len(numbers) > 1 else self.program.threads)
        if parts[1] == "arrive":
            self.arrived[key] = self.arrived.get(key, 0) + LANES
        else:
            warp.at_barrier = key

    def do_griddepcontrol(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """Kernels run one after the other here."""

    def do_setmaxnreg(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """There are registers enough here."""

    def do_fence(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """Memory is in order here."""

    def do_ld(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        space, dtype = parts[1], DTYPES[instruction.dtype]
        targets = [part.strip() for part in instruction.operands[0].strip("{}").split(",")]
        if space == "param":
            name, _, offset = instruction.operands[1].strip("[]").partition("+")
            start = int(offset or 0)
            values = np.frombuffer(self.arguments[name], np.uint8)[start : start + len(targets) * dtype.itemsize]
            for target, value in zip(targets, values.view(dtype), strict=True):
                self.write(warp, target, np.full(LANES, value), lanes)
            return
        results = np.zeros((LANES, len(targets)), dtype)
        for lane in np.flatnonzero(lanes):
            address = int(self.addresses(warp, instruction.operands[1])[lane])
            results[lane] = self.bytes_at(space, address, len(targets) * dtype.itemsize).view(dtype)
        for index, target in enumerate(targets):
            self.write(warp, target, np.ascontiguousarray(results[:, index]), lanes)

    def do_st(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        dtype = DTYPES[instruction.dtype]
        sources = [part.strip() for part in instruction.operands[1].strip("{}").split(",")]
        values = np.stack([self.read(warp, source, instruction.dtype) for source in sources], axis=1)
        addresses = self.addresses(warp, instruction.operands[0])
        for lane in np.flatnonzero(lanes):
            place = self.bytes_at(parts[1], int(addresses[lane]), len(sources) * dtype.itemsize)
            place[:] = np.ascontiguousarray(values[lane]).view(np.uint8)

    def do_red(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        assert parts[2] == "add", instruction.text
        values = self.read(warp, instruction.operands[1], instruction.dtype)
        addresses = self.addresses(warp, instruction.operands[0])
        for lane in np.flatnonzero(lanes):
            place = self.bytes_at(parts[1], int(addresses[lane]), values.dtype.itemsize)
            place[:] = (place.view(values.dtype) + values[lane]).view(np.uint8)

    def do_mbarrier(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        operands = instruction.operands
        place = operands[0] if parts[1] == "init" else operands[1]
        addresses = self.addresses(warp, place)
        for lane in np.flatnonzero(lanes):
            address = int(addresses[lane])
            if parts[1] == "init":
                count = int(self.read(warp, operands[1], "u32")[lane])
                self.shared_at(address, 8)
                self.barriers[address] = Barrier(count, count)
                continue
            barrier = self.barrier(address)
            number = int(self.read(warp, operands[2], "u32")[lane]) if len(operands) > 2 else 1
            if "expect_tx" in parts:
                barrier.bytes += number
                number = 1
            barrier.pending -= number
            barrier.settle()

    def do_emulated(self, warp: Warp, instruction: Instruction, parts: list[str], lanes: np.ndarray) -> None:
        """A wait that is over: `can_run` said so."""


def launch(
    ptx: str,
    buffers: Sequence[Buffer],
    grid: tuple[int, int],
    seed: int = 0,
    kernel: str = "",
    maps: Sequence[TensorMap] = (),
) -> set[str]:
    """Runs a kernel over its grid; of several in a module, the one that `kernel` names.

    Its 8-byte aligned parameters are tensors, in the order of `buffers`, which it writes to, those of 64 tensor maps,
    in the order of `maps`; the others are flags of the product that are off.

    Returns the names of the instructions that were executed.
    """
    program = parse(ptx, kernel)
    memory = GlobalMemory(list(buffers))
    first_words = {
        8: iter(memory.address(index) for index in range(len(buffers))),
        64: iter(range(1, len(maps) + 1)),
    }
    arguments = {
        name: next(first_words[alignment]).to_bytes(8, "little") + b"\xff" * (size - 8)
        if alignment in first_words
        else bytes(size)
        for name, alignment, size in program.parameters
    }
    assert all(next(words, None) is None for words in first_words.values()), program.parameters
    executed: set[str] = set()
    for y in range(grid[1]):
        for x in range(grid[0]):
            block = Block(program, memory, arguments, (x, y), seed * 1000 + y * grid[0] + x)
            block.maps = list(maps)
            block.run()
            executed |= block.executed
    return executed
