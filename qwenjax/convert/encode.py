"""The compiled step of the conversion: a chunk of a tensor to MXFP8, with what the report needs.

One XLA program per element type, fed steps of one size. A core of a Xeon (Sapphire Rapids) quantises 1,100 MB of
bfloat16 a second with XLA (2,300 with the machine to itself) and 130 MB with numpy, from the same integer code, since
each of numpy's forty passes goes through memory. The errors for the report bring XLA to 750 MB (bench/convert.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.quant.bits import E4M3, MAGNITUDE, bitcast, decode, float32_bits, split
from qwenjax.quant.fp8_block import scaled_bits
from qwenjax.quant.mxfp8 import NAN_SCALE, encode_blocks, scale_bytes
from qwenjax_ffi.weights import MIN_EXACT_SCALE, MX_BLOCK

# Elements a call: 1 MiB of bfloat16, small enough for a core's L2 and large enough to hide 50 us of dispatch.
STEP = 1 << 19


@dataclass
class Error:
    """Sums over a tensor: squares of the rounded values, squares of the errors, scales clamped up to 2^-117."""

    squares: float = 0.0
    errors: float = 0.0
    clamped: int = 0

    @property
    def relative(self) -> float:
        """Relative RMSE: sqrt(sum (x - q)^2 / sum q^2); 0 for a tensor of zeros."""
        return float(np.sqrt(self.errors / self.squares)) if self.squares else 0.0

    def add(self, other: Error) -> None:
        self.squares += other.squares
        self.errors += other.errors
        self.clamped += other.clamped


class NonFinite(Exception):
    """Some element of the chunk is NaN or infinite."""


def encode(values: np.ndarray, scales: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, Error]:
    """Codes uint8 [n] and UE8M0 bytes uint8 [n / 32] of a flat chunk, and its error. Raises NonFinite.

    values: float32, bfloat16 or float16 [n]; or float8_e4m3fn [n], with `scales` float32 [n / 32] that multiply
    each run of 32. n is a multiple of 32.
    """
    with jax.default_device(_cpu()):  # a conversion leaves GPUs alone
        return _encode_steps(values, scales)


def _encode_steps(values: np.ndarray, scales: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, Error]:
    codes = np.empty(values.size, np.uint8)
    out_scales = np.empty(values.size // MX_BLOCK, np.uint8)
    error = Error()
    for start in range(0, values.size, STEP):
        part = slice(start, min(start + STEP, values.size))
        blocks = slice(part.start // MX_BLOCK, part.stop // MX_BLOCK)
        # One size means one program; zeros behind the end change no sum and count as no clamp.
        arguments = [_padded(values[part], STEP)]
        if scales is not None:
            arguments.append(_padded(scales[blocks], STEP // MX_BLOCK))
        got = _encode(*arguments)
        codes[part] = np.asarray(got[0]).reshape(-1)[: part.stop - part.start]
        out_scales[blocks] = np.asarray(got[1])[: blocks.stop - blocks.start]
        summary = np.asarray(got[2])
        _add(error, summary)
        if summary[1] == MIN_EXACT_SCALE:  # zeros (padding too) or very small weights: rare, so another pass will do
            error.clamped += int(_count_clamped(*arguments))
    return codes, out_scales, error


@functools.cache
def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return values if values.size == size else np.pad(values, (0, size - values.size))


def _add(error: Error, summary: np.ndarray) -> None:
    if summary[0] == NAN_SCALE:
        raise NonFinite
    unit = 4.0 ** (int(summary[0]) - 127)
    squares, errors = (float(part) for part in summary[2:].view(np.float32))
    error.squares += squares * unit * 2.0**-6
    error.errors += errors * unit * 2.0**-12


@jax.jit
def _encode(values: jax.Array, scales: jax.Array | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes [STEP / 32, 32], UE8M0 bytes [STEP / 32], summary uint32 [4].

    Summary: largest and smallest scale byte, and the bits of the float32 sums of squares of the rounded values (in
    units of 2^-6 times the square of the largest scale) and of the errors (in 2^-12).
    """
    bits = _bits(values, scales)
    codes, out_scales = encode_blocks(bits)
    # Without the barrier XLA would compute the codes once for each sum.
    codes, out_scales = jax.lax.optimization_barrier((codes, out_scales))
    # Float sums over 32 may not be reordered and so not vectorised: 1.4 ns an element against 0.7 and 0.3 of these
    # integer ones, in units of 2^-6 and 2^-3 of the scale (a block's largest element is 224 to 448). Blocks under
    # 1e-33, where the clamp holds, count less exactly. The squares are those of the rounded values, which are quicker
    # to get at: the ratio is off by half its square, 0.04%.
    mantissa, exponent = split(bits)
    exponent = exponent - (out_scales.astype(jnp.int32) - 127)[:, None]
    exact = mantissa >> jnp.clip(17 - exponent, 0, 31).astype(jnp.uint32)
    code_mantissa, code_exponent = decode(E4M3, codes.astype(jnp.uint32))
    rounded = (code_mantissa << 11) >> (28 - code_exponent).astype(jnp.uint32)
    difference = exact - rounded  # modulo 2^32, and so is its square: at most 2^20, 2^25 over a block
    coarse = (code_mantissa << 11) >> (31 - code_exponent).astype(jnp.uint32)  # 3584^2 * 32 is below 2^32
    top = out_scales.max()
    shift = 2 * (out_scales.astype(jnp.int32) - top.astype(jnp.int32))
    weight = bitcast(jnp.maximum(127 + shift, 0).astype(jnp.uint32) << 23, jnp.float32)
    sums = [(weight * (part * part).sum(-1).astype(jnp.float32)).sum() for part in (coarse, difference)]
    head = jnp.stack([top, out_scales.min()]).astype(jnp.uint32)
    return codes, out_scales, jnp.concatenate([head, bitcast(jnp.stack(sums), jnp.uint32)])


@jax.jit
def _count_clamped(values: jax.Array, scales: jax.Array | None = None) -> jax.Array:
    amax = (_bits(values, scales) & MAGNITUDE).max(-1)
    return ((scale_bytes(amax) < MIN_EXACT_SCALE) & (amax != 0)).sum()


def _bits(values: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Float32 bits [STEP / 32, 32]."""
    if scales is None:
        return float32_bits(values.reshape(-1, MX_BLOCK))
    codes = bitcast(values, jnp.uint8).astype(jnp.uint32).reshape(-1, MX_BLOCK)
    return scaled_bits(codes, bitcast(scales, jnp.uint32)[:, None])
