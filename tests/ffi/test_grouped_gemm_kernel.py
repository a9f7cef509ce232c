"""The Hopper grouped GEMM kernels on a GPU, against float64 products of the decoded values."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwenjax_ffi import grouped_gemm_kernel as kernels
from qwenjax_ffi.grouped_gemm import grouped_gemm
from qwenjax_ffi.linear import linear, linear_side_by_side
from qwenjax_ffi.packing import PackedMXFP8Weight, RowOrder, empty_packed, pack, pack_into, packed_shape, unpack
from qwenjax_ffi.weights import MXFP8Weight, Weight
from qwenjax_kernels import fragments
from qwenjax_kernels.tiles import Tile

pytestmark = pytest.mark.gpu

LAYERS, LAYER = 2, 1
ODD_GROUPS = [127, 128, 129, 0, 1]
# Groups, k, outputs: the shapes of the models, each with its own split of rows.
MODEL_SHAPES = {"30b_down": (128, 768, 2048), "235b_up": (16, 4096, 3072), "235b_down": (16, 1536, 4096)}


def random_weight(seed: int, shape: tuple[int, ...]) -> MXFP8Weight:
    """Any element but NaN, scales over ten binades; made on the device."""
    bits, scales = jax.random.split(jax.random.key(seed))
    elements = jax.random.bits(bits, shape, jnp.uint8)
    elements = jnp.where((elements & 0x7F) == 0x7F, elements ^ 0x08, elements)
    drawn = jax.random.randint(scales, (*shape[:-1], shape[-1] // 32), 110, 120)
    return MXFP8Weight(jax.lax.bitcast_convert_type(elements, jnp.float8_e4m3fn), drawn.astype(jnp.uint8))


def random_bf16(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


RANDOM: dict[str, Callable[[int, tuple[int, ...]], Weight]] = {"mxfp8": random_weight, "bf16": random_bf16}


def for_kernel(weight: Weight, order: RowOrder = "plain") -> PackedMXFP8Weight | jax.Array:
    return pack(weight, order) if isinstance(weight, MXFP8Weight) else weight


def float64(weight: Weight, *index: int) -> np.ndarray:
    """One group's matrix, decoded on the host."""
    if not isinstance(weight, MXFP8Weight):
        return on_host(weight[index])
    elements = np.asarray(weight.elements[index]).astype(np.float64)
    scales = np.exp2(np.asarray(weight.scales[index]).astype(np.float64) - 127)
    return (elements.reshape(*elements.shape[:-1], -1, 32) * scales[..., None]).reshape(elements.shape)


def rows_of(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def on_host(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def spans(sizes: list[int] | np.ndarray) -> list[tuple[int, slice]]:
    """(group, its rows) of the groups that have any."""
    ends = np.cumsum(sizes)
    return [(g, slice(end - size, end)) for g, (size, end) in enumerate(zip(sizes, ends, strict=True)) if size]


def assert_bf16_close(y: np.ndarray, expected: np.ndarray, magnitude: np.ndarray, k: int) -> None:
    """Rounded once to bf16, sums in float32: |error| <= 2^-8 |y| + 4 sqrt(k) 2^-24 sum |x| |w|."""
    bound = 2.0**-8 * np.abs(expected) + 4 * np.sqrt(k) * 2.0**-24 * magnitude
    worst = np.max(np.abs(y - expected) / (bound + 1e-300))
    assert worst <= 1, worst


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize(
    ("k", "width", "sizes", "tile"),
    [
        (32, 32, [5], Tile(8)),
        (32, 96, [0, 3], Tile(16)),
        (32, 64, [2, 0, 7], Tile(8, 3, 1, split_k=True)),  # the second and third warpgroup have nothing to add
        (96, 160, [0, 1, 17, 9, 8], Tile(8)),
        (160, 64, [0, 0, 0, 0, 40], Tile(16, 3, 1)),
        (1120, 352, [3, 0, 40, 16], Tile(16, 4, 1, split_k=True)),
        (4096, 288, ODD_GROUPS, Tile(32, 2, 1)),
        (4096, 288, ODD_GROUPS, Tile(32, 3, 1, split_k=True)),
        (2048, 1536, ODD_GROUPS, Tile(64, 2, 2)),
        (768, 2048, ODD_GROUPS, None),
        (2048, 512, [3], None),
        (2048, 512, [200], None),
    ],
    ids=str,
)
def test_float32_result_equals_float64(k: int, width: int, sizes: list[int], tile: Tile | None, kind: str) -> None:
    weight = RANDOM[kind](0, (LAYERS, len(sizes), width, k))
    x = rows_of(1, sum(sizes), k)
    call = jax.jit(lambda *a: kernels.grouped_gemm(*a, out_dtype=jnp.float32, tile=tile))
    y = np.asarray(call(x, jnp.asarray(sizes, jnp.int32), for_kernel(weight), jnp.asarray([LAYER], jnp.int32)))
    expected = np.concatenate([on_host(x[rows]) @ float64(weight, LAYER, g).T for g, rows in spans(sizes)])
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_dtype_that_the_kernel_does_not_write_is_rounded_to_from_float32() -> None:
    weight, x, sizes = for_kernel(random_weight(0, (1, 1, 96, 160))), rows_of(1, 40, 160), jnp.asarray([40], jnp.int32)
    exact = grouped_gemm(x, sizes, weight, 0, out_dtype=jnp.float32, implementation="kernel")
    for dtype in (jnp.float16, jnp.bfloat16):
        ours = grouped_gemm(x, sizes, weight, 0, out_dtype=dtype, implementation="kernel")
        np.testing.assert_array_equal(on_host(ours), on_host(exact.astype(dtype)))
        np.testing.assert_array_equal(
            on_host(linear(x, weight[0, 0], out_dtype=dtype, implementation="kernel")), on_host(ours)
        )


@pytest.mark.parametrize(
    ("rows", "k", "widths"),
    [(1, 2048, (4096, 512, 512)), (64, 2048, (4096, 512, 512)), (300, 256, (64, 128, 96)), (16, 96, (64, 40))],
    ids=str,
)
def test_matrices_side_by_side_equal_float64(rows: int, k: int, widths: tuple[int, ...]) -> None:
    weights = [random_weight(seed, (LAYERS, width, k)) for seed, width in enumerate(widths)]
    x = rows_of(9, rows, k)
    for out_dtype, bound in ((jnp.float32, 1e-6), (jnp.bfloat16, 2.0**-8)):
        y = linear_side_by_side(
            x, [pack(w) for w in weights], jnp.int32(LAYER), out_dtype=out_dtype, implementation="kernel"
        )
        expected = on_host(x) @ np.concatenate([float64(weight, LAYER) for weight in weights]).T
        assert y.dtype == out_dtype
        assert np.linalg.norm(on_host(y) - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("rows", "k", "tile"),
    [
        (1, 4096, Tile(8, 4, 1, split_k=True, k_blocks=4)),
        (64, 4096, Tile(64, 2, 1, split_k=True, k_blocks=2)),
        (30, 512, Tile(32, 2, 1, k_blocks=4)),
        (200, 4096, Tile(128, 2, 1, split_k=True, k_blocks=2)),
    ],
    ids=str,
)
def test_blocks_of_a_cluster_add_their_runs_of_k_up(rows: int, k: int, tile: Tile) -> None:
    weight, x = random_weight(3, (LAYERS, 1, 2048, k)), rows_of(4, rows, k)
    sizes, layer = jnp.asarray([rows], jnp.int32), jnp.int32(LAYER)
    call = jax.jit(lambda *a: kernels.grouped_gemm(*a, out_dtype=jnp.float32, tile=tile))
    expected = on_host(x) @ float64(weight, LAYER, 0).T
    first, second = (np.asarray(call(x, sizes, pack(weight), layer)) for _ in range(2))
    assert np.linalg.norm(first - expected) <= 1e-6 * np.linalg.norm(expected)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("shape", MODEL_SHAPES)
@pytest.mark.parametrize("mean", [4, 64, 150])
def test_bf16_result_equals_float64_at_the_models_shapes(shape: str, mean: int, kind: str) -> None:
    groups, k, width = MODEL_SHAPES[shape]
    sizes = np.random.default_rng(0).multinomial(mean * groups, np.full(groups, 1 / groups))
    weight = RANDOM[kind](2, (groups, width, k))
    x = rows_of(3, mean * groups, k)
    y = on_host(jax.jit(kernels.grouped_gemm)(x, jnp.asarray(sizes, jnp.int32), for_kernel(weight)))
    some = spans(sizes)
    for g, rows in (some[0], some[len(some) // 2], some[-1]):
        xs, w = on_host(x[rows]), float64(weight, g)
        assert_bf16_close(y[rows], xs @ w.T, np.abs(xs) @ np.abs(w).T, k)


GATE_UP_TILES = [Tile(8), Tile(16, 2, 2), Tile(16, 4, 1, True), Tile(64, 2, 3), Tile(64, 2, 4), Tile(128, 2, 2)]


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        *(("mxfp8", tile) for tile in GATE_UP_TILES),
        *(("bf16", tile) for tile in (Tile(16, 2, 1), Tile(16, 2, 1, True), Tile(64, 2, 2), Tile(128, 2, 2))),
    ],
    ids=str,
)
def test_gate_up_gathers_its_rows_and_applies_swiglu(kind: str, tile: Tile) -> None:
    k, width, tokens, sizes = 416, 160, 37, [129, 0, 1, 64, 300]
    weight = RANDOM[kind](4, (LAYERS, len(sizes), 2 * width, k))
    x = rows_of(5, tokens, k) * jnp.bfloat16(2.0 ** (-8 if kind == "mxfp8" else -4))
    row_token = np.random.default_rng(1).integers(0, tokens, sum(sizes)).astype(np.int32)
    call = jax.jit(lambda *a: kernels.moe_gate_up(*a, tile=tile))
    arguments = (x, jnp.asarray(row_token), jnp.asarray(sizes, jnp.int32), for_kernel(weight, "gate_up"))
    y = on_host(call(*arguments, jnp.asarray([LAYER], jnp.int32)))
    for g, rows in spans(sizes):
        w, xs = float64(weight, LAYER, g), on_host(x)[row_token[rows]]
        gate, up = np.split(xs @ w.T, 2, axis=1)
        error = np.abs(xs) @ np.abs(w).T
        gate_error, up_error = np.split(error, 2, axis=1)
        # |d silu| <= 1.1, |silu(gate)| <= |gate|; the hardware's exp2 and reciprocal add a few 2^-22.
        magnitude = 1.1 * np.abs(up) * gate_error + np.abs(gate) * up_error + 8 * np.abs(gate * up)
        assert_bf16_close(y[rows], gate / (1 + np.exp(-gate)) * up, magnitude, k)


DOWN_TILES = [Tile(8), Tile(16, 3, 1), Tile(16, 4, 1, True), Tile(64, 2, 2), Tile(64, 2, 4), Tile(128, 2, 2)]


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        *(("mxfp8", tile) for tile in DOWN_TILES),
        *(("bf16", tile) for tile in (Tile(16, 2, 1), Tile(16, 2, 1, True), Tile(64, 2, 2), Tile(128, 2, 2))),
    ],
    ids=str,
)
def test_down_applies_the_routing_weight(kind: str, tile: Tile) -> None:
    k, width, sizes = 768, 224, [129, 0, 1, 64, 300]
    weight = RANDOM[kind](6, (len(sizes), width, k))
    h, row_weight = rows_of(7, sum(sizes), k), np.random.default_rng(2).random(sum(sizes)).astype(np.float32)
    call = jax.jit(lambda *a: kernels.moe_down(*a, tile=tile))
    y = on_host(call(h, jnp.asarray(sizes, jnp.int32), for_kernel(weight), jnp.asarray(row_weight)))
    for g, rows in spans(sizes):
        w, xs, factor = float64(weight, g), on_host(h[rows]), row_weight[rows, None].astype(np.float64)
        assert_bf16_close(y[rows], xs @ w.T * factor, np.abs(xs) @ np.abs(w).T * factor, k)


def test_every_scale_decodes_exactly_and_larger_ones_are_not_finite() -> None:
    """One-hot rows read the weights back: each scale byte in a row of its own, all 254 finite elements beside it."""
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    elements = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256)).copy()
    finite = (elements[0] & 0x7F) != 0x7F
    elements[:, ~finite] = 0
    weight = MXFP8Weight(jnp.asarray(elements.view(ml_dtypes.float8_e4m3fn))[None], jnp.asarray(scales)[None])
    x = jnp.eye(256, dtype=jnp.bfloat16)
    call = jax.jit(lambda *a: kernels.grouped_gemm(*a, out_dtype=jnp.float32))
    y = np.asarray(call(x, jnp.asarray([256], jnp.int32), pack(weight)))
    exact = slice(10, 135)
    np.testing.assert_array_equal(y.T[exact].astype(np.float64), float64(weight, 0)[exact])
    assert not np.isfinite(y.T[135:]).any()


@pytest.mark.parametrize("kind", RANDOM)
def test_padding_is_neither_read_nor_written(kind: str) -> None:
    from cutlass import cute
    from cutlass.jax import cutlass_call

    from qwenjax_kernels.grouped_gemm_sm90_bf16 import BF16GroupedGemmSm90
    from qwenjax_kernels.grouped_gemm_sm90_mxfp8 import MXFP8GroupedGemmSm90

    k, width, sizes, padding = 160, 96, [3, 0, 70], 90
    rows = sum(sizes) + padding
    weight = for_kernel(RANDOM[kind](8, (3, 2 * width, k)), "gate_up")
    x = rows_of(9, 20, k).at[-1].set(jnp.nan)  # a token that only padding names
    tokens = np.random.default_rng(3).integers(0, 19, rows).astype(np.int32)
    good = jnp.asarray(np.where(np.arange(rows) < sum(sizes), tokens, 19))
    wild = good.at[sum(sizes) :].set(1 << 30)
    tile = Tile(16)
    form = MXFP8GroupedGemmSm90 if kind == "mxfp8" else BF16GroupedGemmSm90
    kernel = form(k=k, width=width, num_groups=3, epilogue="swiglu", tile=tile, num_sms=132)

    @cute.jit
    def over_poison(stream, out, x, weights, sizes, tokens):  # type: ignore[no-untyped-def]
        kernel.launch(stream, x, weights, sizes, tokens, None, None, out)

    shape = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    call = jax.jit(cutlass_call(over_poison, output_shape_dtype=shape, input_output_aliases={0: 0}))
    poison = jnp.full(shape.shape, jnp.nan, shape.dtype)
    data = weight.data if isinstance(weight, PackedMXFP8Weight) else weight
    for row_token in (good, wild):
        y = on_host(call(poison, x, data, jnp.asarray(sizes, jnp.int32), row_token))
        assert np.isfinite(y[: sum(sizes)]).all()
        assert np.isnan(y[sum(sizes) :]).all()


@pytest.mark.parametrize("kind", RANDOM)
@pytest.mark.parametrize("tile", [Tile(8), Tile(16, 2, 1, True), Tile(128, 2, 1, True)], ids=str)
def test_nan_in_rows_of_padding_reaches_no_result(kind: str, tile: Tile) -> None:
    sizes, rows, k = jnp.asarray([3, 0, 70], jnp.int32), 200, 160
    weight, h, factors = for_kernel(RANDOM[kind](25, (3, 96, k))), rows_of(26, rows, k), jnp.ones(rows, jnp.float32)
    call = jax.jit(lambda *a: kernels.moe_down(*a, tile=tile))
    clean = on_host(call(h, sizes, weight, factors))[:73]
    dirty = on_host(call(h.at[73:].set(jnp.nan), sizes, weight, factors.at[73:].set(jnp.nan)))[:73]
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("kind", RANDOM)
def test_nan_in_one_groups_weight_stays_in_that_group(kind: str) -> None:
    sizes = [5, 20, 0, 7]
    weight = RANDOM[kind](10, (4, 128, 256))
    if isinstance(weight, MXFP8Weight):
        poisoned: Weight = MXFP8Weight(weight.elements, weight.scales.at[1, :, 3].set(255))
    else:
        poisoned = weight.at[1, :, 100].set(jnp.nan)
    x, group_sizes = rows_of(11, 32, 256), jnp.asarray(sizes, jnp.int32)
    call = jax.jit(kernels.grouped_gemm)
    clean, dirty = (on_host(call(x, group_sizes, for_kernel(w))) for w in (weight, poisoned))
    assert np.isnan(dirty[5:25]).all()
    np.testing.assert_array_equal(np.delete(dirty, slice(5, 25), 0), np.delete(clean, slice(5, 25), 0))


def test_no_rows_at_all() -> None:
    weight = pack(random_weight(12, (3, 64, 128)))
    jax.block_until_ready(jax.jit(kernels.grouped_gemm)(rows_of(13, 8, 128), jnp.zeros(3, jnp.int32), weight))


def test_more_than_two_to_the_31_outputs() -> None:
    """65,537 tokens of eight choices at 235B shapes: first, border and last rows of 2.1e9 outputs."""
    groups, k, width, rows = 16, 1536, 4096, 65537 * 8
    sizes = np.full(groups, rows // groups)
    sizes[-1] += rows - sizes.sum()
    weight = random_weight(14, (groups, width, k))
    h, factors = jnp.tile(rows_of(15, 65537, k), (8, 1)), jnp.ones(rows, jnp.float32)
    y = jax.jit(kernels.moe_down)(h, jnp.asarray(sizes, jnp.int32), pack(weight), factors)
    border = (1 << 31) // width
    group = np.repeat(np.arange(groups), sizes)
    for row in (0, border - 1, border, rows - 1):
        xs, w = on_host(h[row]), float64(weight, group[row])
        assert_bf16_close(on_host(y[row]), w @ xs, np.abs(w) @ np.abs(xs), k)


def test_a_weight_stack_above_4_gib() -> None:
    layers, groups, k, width = 22, 16, 4096, 1536
    shape = (layers, groups, 2 * width, k)
    # Bits 3 and 4 of a byte are the lowest of a value's seven: cleared, no element is NaN. The scales are moderate.
    one = jax.random.bits(jax.random.key(16), packed_shape(shape[1:], "gate_up"), jnp.uint8) & jnp.uint8(0xE7)
    one = one.at[..., fragments.UNIT_ELEMENT_BYTES :].set(115)
    layer_bits = jnp.arange(layers, dtype=jnp.uint8) << 5  # in elements and scales alike, to tell the layers apart
    data = jax.jit(lambda one, bits: one ^ bits[:, None, None, None, None] & jnp.uint8(0x20))(one, layer_bits)
    assert data.nbytes > 1 << 32
    stack = PackedMXFP8Weight(data, 2 * width, k, "gate_up")
    x = rows_of(17, groups, k) * jnp.bfloat16(2.0**-8)
    y = on_host(
        jax.jit(kernels.moe_gate_up)(
            x, jnp.arange(groups, dtype=jnp.int32), jnp.ones(groups, jnp.int32), stack, jnp.asarray([layers - 1])
        )
    )
    last = unpack(PackedMXFP8Weight(data[-1], 2 * width, k, "gate_up"))
    for group in (0, groups - 1):
        w, xs = float64(last, group), on_host(x[group])
        gate, up = np.split(w @ xs, 2)
        gate_error, up_error = np.split(np.abs(w) @ np.abs(xs), 2)
        magnitude = 1.1 * np.abs(up) * gate_error + np.abs(gate) * up_error + 8 * np.abs(gate * up)
        assert_bf16_close(y[group], gate / (1 + np.exp(-gate)) * up, magnitude, k)


def test_a_bf16_weight_stack_above_4_gib() -> None:
    layers, groups, k, width = 12, 16, 1536, 8192
    stack = jax.jit(lambda: jax.random.normal(jax.random.key(23), (layers, groups, width, k), jnp.bfloat16))()
    assert stack.nbytes > 1 << 32
    h, factors = rows_of(24, groups, k), jnp.ones(groups, jnp.float32)
    sizes = jnp.ones(groups, jnp.int32)
    y = on_host(jax.jit(kernels.moe_down)(h, sizes, stack, factors, jnp.asarray([layers - 1])))
    for group in (0, groups - 1):
        w, xs = float64(stack, layers - 1, group), on_host(h[group])
        assert_bf16_close(y[group], w @ xs, np.abs(w) @ np.abs(xs), k)


def loop_result(calls: int) -> np.ndarray:
    """`calls` pairs of gate/up and down in one program, counts that change every call, x carried and donated."""
    groups, k, width, tokens, top_k = 8, 256, 128, 24, 2
    w13 = pack(random_weight(18, (LAYERS, groups, 2 * width, k)), "gate_up")
    w2 = pack(random_weight(19, (LAYERS, groups, k, width)))
    rows = tokens * top_k

    def step(i: jax.Array, x: jax.Array) -> jax.Array:
        layer = (i % LAYERS).reshape(1)
        cut = jnp.sort(jax.random.randint(jax.random.key(i), (groups - 1,), 0, rows + 1))
        sizes = jnp.diff(cut, prepend=0, append=rows).astype(jnp.int32)
        h = kernels.moe_gate_up(x, jnp.arange(rows, dtype=jnp.int32) % tokens, sizes, w13, layer)
        y = kernels.moe_down(h, sizes, w2, jnp.full(rows, 0.5, jnp.float32), layer).astype(jnp.float32)
        total = y[:tokens] + y[tokens:]
        return (total / (1e-6 + jnp.abs(total).max(axis=1, keepdims=True))).astype(jnp.bfloat16)

    run = jax.jit(lambda x: jax.lax.fori_loop(0, calls, step, x), donate_argnums=0)
    if calls == 1:
        one = jax.jit(step)
        x = rows_of(20, tokens, k)
        for i in range(20):
            x = one(jnp.int32(i), x)
        return on_host(x)
    return on_host(run(rows_of(20, tokens, k)))


def test_a_donated_loop_equals_single_calls() -> None:
    np.testing.assert_array_equal(loop_result(20), loop_result(1))


def test_a_thousand_calls_repeat_to_the_bit_without_command_buffers() -> None:
    result = loop_result(1000)
    assert np.isfinite(result).all()
    code = (
        "import importlib.util, sys, numpy as np;"
        f"spec = importlib.util.spec_from_file_location('again', {__file__!r});"
        "again = importlib.util.module_from_spec(spec); spec.loader.exec_module(again);"
        "np.save(sys.stdout.buffer, again.loop_result(1000))"
    )
    environment: dict[str, Any] = os.environ | {
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    np.testing.assert_array_equal(result, np.load(io.BytesIO(run.stdout)))


@pytest.mark.parametrize("order", ["plain", "gate_up"])
def test_available_here(order: RowOrder) -> None:
    weight = pack(random_weight(21, (2, 64, 128)), order)
    assert kernels.unavailable(rows_of(22, 4, 128), weight, order) is None


@pytest.mark.parametrize(("order", "out", "k"), [("gate_up", 1536, 2048), ("plain", 2048, 768)])
def test_packing_a_layer_takes_less_than_a_layer_beside_the_stack(order: RowOrder, out: int, k: int) -> None:
    stack = jax.eval_shape(lambda: empty_packed((4, 128, out, k), order))
    layer = jax.eval_shape(lambda: random_weight(0, (128, out, k)))
    memory = pack_into.lower(stack, layer, jnp.int32(1)).compile().memory_analysis()
    assert memory.alias_size_in_bytes == stack.data.size
    assert memory.temp_size_in_bytes < layer.elements.size
