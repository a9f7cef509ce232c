"""The interface that every quantisation format has, and the error for weights that none can hold."""

from __future__ import annotations

from abc import ABC, abstractmethod

import jax
import numpy as np

from qwenjax.quant.bits import INFINITY, MAGNITUDE, Array, float32_bits


class NonFiniteError(ValueError):
    """A weight holds NaN or infinity: `index` says where. No block format can represent such a block."""

    def __init__(self, index: tuple[int, ...], value: float, name: str = "the array") -> None:
        self.index, self.value = index, value
        super().__init__(f"{name} holds {value} at index {list(index)}: repair the source before quantising it")


class Format(ABC):
    """A number format for weights [..., out, in], contraction axis last.

    `quantise` and `dequantise` take numpy arrays and, under jit or not, JAX arrays, and give the same bits for
    both. numpy input with NaN or infinity raises NonFiniteError; a JAX program cannot raise, so there every
    block with one decodes to NaN.
    """

    name: str
    bytes_per_element: float  # of a large matrix, scales included

    @abstractmethod
    def quantise(self, array: Array) -> tuple[Array, ...]:
        """(elements, scales...) of a float32, bfloat16 or float16 array; its shape has to suit the blocks."""

    @abstractmethod
    def dequantise(self, elements: Array, *scales: Array) -> Array:
        """The float32 values that (elements, scales...) stand for, each rounded at most once."""


def checked_bits(array: Array) -> Array:
    """float32_bits, after the check that numpy input is finite."""
    bits = float32_bits(array)
    if not isinstance(array, jax.Array):
        check_finite(array, bits)
    return bits


def check_finite(array: np.ndarray, bits: np.ndarray) -> None:
    """Raises NonFiniteError for the first NaN or infinity of an array, given its float32 bits."""
    if array.size and int((bits & MAGNITUDE).max()) >= INFINITY:
        index = np.unravel_index(int(np.argmax((bits & MAGNITUDE) >= INFINITY)), array.shape)
        raise NonFiniteError(tuple(map(int, index)), float(array[index]))


def check_multiple(array: Array, block: int, name: str) -> None:
    """Raises ValueError where the last axis does not divide into blocks."""
    if array.ndim == 0 or array.shape[-1] % block:
        raise ValueError(
            f"{name} needs a contraction axis that {block} divides; shape {list(array.shape)} does not fit"
        )
