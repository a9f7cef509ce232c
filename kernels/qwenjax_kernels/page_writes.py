"""New keys and values to their places in a paged cache, both in one launch. A thread copies 16 bytes of each."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from qwenjax_kernels import device, vectors

THREADS = 128


class PageWrites:
    """The kernel for one problem; call `launch` from a `@cute.jit` function.

    Shapes: k, v [batch, tokens, kv_heads, head_dim], head_dim elements in row_bytes, a multiple of 16; page_table int32
    [batch, max_pages]; positions int32 [batch, tokens]; layer int32 [1]; key_cache, value_cache [layers, num_pages,
    kv_heads, page_size, head_dim]. Negative positions and those past the table are not written.
    follows: the kernel that makes k and v may still run at the launch.
    """

    def __init__(
        self,
        *,
        batch: int,
        tokens: int,
        kv_heads: int,
        row_bytes: int,
        num_pages: int,
        page_size: int,
        max_pages: int,
        follows: bool = False,
    ) -> None:
        self.follows = follows
        self.tokens = tokens
        self.kv_heads = kv_heads
        self.row_bytes = row_bytes
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_pages = max_pages
        self.token_vectors = kv_heads * row_bytes // 16
        self.count = batch * tokens * self.token_vectors

    @cute.jit
    def launch(
        self,
        stream: cuda.CUstream,
        k: cute.Tensor,
        v: cute.Tensor,
        page_table: cute.Tensor,
        positions: cute.Tensor,
        layer: cute.Tensor,
        key_cache: cute.Tensor,
        value_cache: cute.Tensor,
    ) -> None:
        """Enqueues the kernel on the stream."""
        self.kernel(k, v, page_table, positions, layer, key_cache, value_cache).launch(
            grid=[-(-self.count // THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.follows
        )

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        page_table: cute.Tensor,
        positions: cute.Tensor,
        layer: cute.Tensor,
        key_cache: cute.Tensor,
        value_cache: cute.Tensor,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        index = block * THREADS + thread
        if cutlass.const_expr(self.follows):
            cute.arch.griddepcontrol_wait()
        if index < self.count:
            query = index // self.token_vectors
            position = device.load_global(positions.iterator.toint() + Int64(query) * 4)
            slot = position // self.page_size
            page = Int32(-1)
            if position >= 0 and slot < self.max_pages:
                entry = Int64(query // self.tokens) * self.max_pages + Int64(slot)
                page = device.load_global(page_table.iterator.toint() + entry * 4)
            if page >= 0 and page < self.num_pages:
                vector = index - query * self.token_vectors
                head = vector // (self.row_bytes // 16)
                block_of_page = (Int64(layer[0]) * self.num_pages + Int64(page)) * self.kv_heads + Int64(head)
                row = block_of_page * self.page_size + Int64(position - slot * self.page_size)
                target = row * self.row_bytes + Int64(vector * 16 - head * self.row_bytes)
                source = Int64(index) * 16
                for new, cache in ((k, key_cache), (v, value_cache)):
                    words = vectors.load_operand(new.iterator.toint() + source)
                    vectors.store_result(cache.iterator.toint() + target, words)
