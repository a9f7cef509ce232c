"""All-reduce over symmetric memory, alone or with the residual addition and RMSNorm that follow it in a decoder layer.

One-shot for small messages: every rank stores its words beside the epoch to every rank, and each adds up what
arrives; one trip, no fences. Two-shot for large ones: through rings of tiles, each rank reduces a slice of every tile
and stores it to all, over peer memory or through the switch (`peers`). `all_reduce_protocol` has the order of it all.

Elements are moved 16 bytes at a time. Operands and results may begin at any element and have any number of them: what
is not whole, aligned vectors is read and written an element at a time and travels as whole vectors all the same. Where
the message is sums of rows, all lie at multiples of 16 bytes, as XLA's buffers do.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from qwenjax_kernels import all_reduce_protocol as protocol
from qwenjax_kernels import peers, signals
from qwenjax_kernels.all_reduce_parts import OneShotPart, TwoShotPart
from qwenjax_kernels.expert_rows_limits import MAX_TOP_K
from qwenjax_kernels.heap_layout import MAX_BLOCKS, TEAMS, THREADS, TILE_BYTES, VECTOR, HeapLayout

Algorithm = Literal["one_shot", "two_shot", "multicast"]  # the last is two-shot through the switch
WARPS = THREADS // 32


class AllReduce:
    """The kernel for one message; call `launch` from a `@cute.jit` function.

    ranks: of the heap. dtype: BFloat16, Float16 or Float32. elements: of the message, at least 1. row: 0, or the
    features of a row for the fused form, whose bytes must be a multiple of 16; eps: RMSNorm's. top_k, features: 0, or
    the most rows of a token and their features, where the message is sums of rows. timeout_ns: of each wait; trap:
    whether a failure stops the context (see `signals`). teams: of a block in two-shot; chosen where None.
    """

    def __init__(
        self,
        *,
        ranks: int,
        dtype: Any,
        elements: int,
        algorithm: Algorithm,
        row: int = 0,
        top_k: int = 0,
        features: int = 0,
        eps: float = 0.0,
        timeout_ns: int = 60 * 10**9,
        trap: bool = True,
        max_blocks: int = MAX_BLOCKS,
        teams: int | None = None,
    ) -> None:
        self.layout = HeapLayout(ranks)
        self.ranks, self.dtype, self.elements, self.algorithm = ranks, dtype, elements, algorithm
        self.top_k, self.features = top_k, features
        self.row, self.eps, self.timeout_ns, self.trap = row, eps, timeout_ns, trap
        self.width = dtype.width // 8
        self.per_vector = VECTOR // self.width
        self.vectors = -(-elements // self.per_vector)
        self.full_vectors = elements // self.per_vector
        if not 1 <= elements < 1 << 31:
            raise ValueError(f"a message of {elements} elements; the kernel is for 1 to 2^31 - 1")
        if not 1 <= max_blocks <= MAX_BLOCKS:
            raise ValueError(f"max_blocks is {max_blocks}; the heap has room for 1 to {MAX_BLOCKS}")
        if row and (row * self.width % VECTOR or elements % row):
            raise ValueError(f"{elements} elements in rows of {row}: rows must be whole vectors of {VECTOR} bytes")
        self.row_vectors = row // self.per_vector
        if top_k and (algorithm != "two_shot" or dtype is not BFloat16 or features % self.per_vector):
            raise ValueError(
                f"{algorithm} of {dtype.__name__} rows of {features} features: rows are added up by two_shot alone, in "
                f"BFloat16 and multiples of {self.per_vector}"
            )
        if top_k > MAX_TOP_K or (top_k and elements % features):
            raise ValueError(f"{elements} sums of up to {top_k} rows of {features} features; at most {MAX_TOP_K} rows")
        if algorithm == "one_shot":
            limit = self.layout.one_shot_bytes
            if self.vectors * VECTOR > limit:
                raise ValueError(
                    f"{self.vectors * VECTOR} bytes; a one-shot message of {ranks} ranks has at most {limit}"
                )
            self.teams = 1
            self.tile_vectors = self.row_vectors or self.even_tile(128, THREADS)
        else:
            if self.row_vectors * VECTOR > TILE_BYTES:
                raise ValueError(f"a row of {row} elements; at most {TILE_BYTES // self.width} fit a tile")
            self.teams = teams or self.choose_teams()
            if self.teams not in (1, 2, 4, TEAMS):
                raise ValueError(f"{teams} teams a block; 1, 2, 4 or {TEAMS} have rings and signals in the heap")
            if self.row_vectors * VECTOR > TILE_BYTES // self.teams:
                raise ValueError(f"a row of {row} elements does not fit the tile of one of {self.teams} teams")
            self.tile_vectors = self.even_tile(THREADS // self.teams, TILE_BYTES // self.teams // VECTOR)
            if row:
                self.tile_vectors = max(1, self.tile_vectors // self.row_vectors) * self.row_vectors
            if top_k:
                token_vectors = features // self.per_vector
                self.tile_vectors = next(n for n in range(self.tile_vectors, 0, -1) if token_vectors % n == 0)
        self.tiles = -(-self.vectors // self.tile_vectors)
        self.grid = min(max_blocks, self.tiles)
        most = protocol.STEPS - 2  # turns, and a signal more
        if self.tiles > most * self.grid * self.teams:
            raise ValueError(f"{elements} elements are {self.tiles} tiles, more than {most} a team")

    def choose_teams(self) -> int:
        """Teams of a block. One where nothing but tiles is moved (128 MiB on two H200s: 388 us as with 2, 402 with 4);
        more where a team does more than that, in which another one stores: 8 where it adds rows up (16K tokens, a tile
        of 8 KiB each: 418 us, 473 with 4; 414 and 436 with 16 of half a token), 2 with a norm alone (together with a
        sum of rows apart 569 us, 585 with 1, 571 with 4, 577 with 8). A row must fit a team's tile."""
        teams = TEAMS if self.top_k else 2 if self.row else 1
        while self.row_vectors * VECTOR > TILE_BYTES // teams:
            teams //= 2
        return teams

    def even_tile(self, smallest: int, largest: int) -> int:
        """Vectors of a tile with which every team of every block has one, as far as these bounds let it."""
        even = -(-self.vectors // (MAX_BLOCKS * self.teams))
        return min(largest, -(-even // smallest) * smallest)

    @property
    def tag(self) -> int:
        """1 to STEPS - 1, by which ranks find out that they run different calls."""
        call = f"{self.algorithm} {self.dtype.__name__} {self.elements} {self.row} {self.top_k} {self.features}"
        call += f" {self.grid} {self.teams}"
        return zlib.crc32(call.encode()) % (protocol.STEPS - 1) + 1

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        x: Int64,
        table: Int64,
        token_rows: Int64 | None,
        residual: Int64 | None,
        weight: Int64 | None,
        out: Int64,
        normed: Int64 | None,
    ) -> None:
        """Enqueues the kernel. All are addresses.

        x, out: elements of dtype; table: the epoch array, whose count is advanced. token_rows: int32 [tokens, top_k],
        the row of each of a token's choices, -1 for none; x is rows [*, features] then, and the message their sums in
        float32, in the order of the choices, rounded: what `sum_rows` writes. The fused form has residual and
        normed [rows, row] and weight [row]: out is residual + the sum, normed its RMSNorm times weight.
        """
        self.kernel(x, table, token_rows, residual, weight, out, normed).launch(
            grid=[self.grid, 1, 1], block=[THREADS, 1, 1], min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        table: Int64,
        token_rows: Int64 | None,
        residual: Int64 | None,
        weight: Int64 | None,
        out: Int64,
        normed: Int64 | None,
    ) -> None:
        @cute.struct
        class Storage:
            bases: cute.struct.MemRange[Int64, self.ranks]
            epoch: cute.struct.MemRange[Int64, 1]
            sums: cute.struct.MemRange[Float32, WARPS]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        bases = storage.bases.data_ptr().toint()
        epoch = storage.epoch.data_ptr().toint()
        sums = storage.sums.data_ptr().toint()
        peers.Bases(bases, self.ranks).load(table)  # on its way together with the rank
        if peers.this_rank(table) >= 0:
            self.run(x, table, token_rows, residual, weight, out, normed, bases, epoch, sums)

    @cute.jit
    def run(
        self,
        x: Int64,
        table: Int64,
        token_rows: Int64 | None,
        residual: Int64 | None,
        weight: Int64 | None,
        out: Int64,
        normed: Int64 | None,
        shared_bases: Int32,
        shared_epoch: Int32,
        shared_sums: Int32,
    ) -> None:
        """What a block does."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = peers.this_rank(table)
        bases = peers.Bases(shared_bases, self.ranks)
        own = bases.base(rank)
        addresses = (x, token_rows, residual, weight, out, normed)
        common = (self, bases, rank, own, block, thread, shared_sums)
        # What needs no epoch is on its way while it is drawn.
        if cutlass.const_expr(self.algorithm == "one_shot"):
            one_shot = OneShotPart(common, addresses)
            first_words = one_shot.first_vector(block, thread)
        begun = Int64(0)
        if thread == 0:
            begun = signals.arrive(own, block, self.grid)
            if block == 0:
                peers.count_collective(table)
        if cutlass.const_expr(self.algorithm != "one_shot"):
            transport = peers.MulticastTransport if self.algorithm == "multicast" else peers.PeerTransport
            two_shot = TwoShotPart(common, addresses, transport(bases, table, rank, self.ranks, self.dtype))
            two_shot.stage_first()
        if thread == 0:
            cute.arch.inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[shared_epoch, begun])
        cute.arch.sync_threads()
        epoch = cute.arch.inline_ptx(
            "ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[shared_epoch]
        )
        record = peers.failure_record(table)
        watch = signals.Watch(bases, own, record, rank, epoch, self.tag, self.timeout_ns, self.trap)
        if cutlass.const_expr(self.algorithm == "one_shot"):
            one_shot.begin(watch)
            one_shot.run(first_words)
        else:
            two_shot.begin(watch)
            two_shot.run()
