"""Compiles dispatch and combine without a GPU: `python compile_token_exchange.py '["dispatch", 2, ...]' ...`.

Each argument is [kernel, ranks, dtype, tokens, hidden, top_k], the kernel "dispatch", "dispatch MXFP8" or "combine"; or
these with experts and blocks for the kernel as `exchange_ranks` runs it. The environment (CUTE_DSL_ARCH,
CUTE_DSL_COMPILER_OPT, CUTE_DSL_DUMP_DIR) says for what and which reports come out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import cutlass.jax
import jax
import jax.numpy as jnp

from qwenjax_ffi import token_exchange_kernel as kernels
from qwenjax_kernels.heap_layout import num_words

EXPERTS = 128


def lower(name: str, ranks: int, dtype: str, tokens: int, hidden: int, top_k: int) -> None:
    """Lowers one call for CUDA, which compiles its kernel."""
    units = kernels.ExchangeRows(tokens, hidden, top_k, dtype).units

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    epochs = array("int32", num_words(ranks, False, units))
    checks = cutlass.jax.get_export_disabled_safety_checks()
    if name != "combine":
        call = jax.jit(
            lambda x, ids, weights, epochs: kernels.dispatch(
                x, ids, weights, epochs, ranks, units, EXPERTS // ranks, name != "dispatch"
            ),
            donate_argnums=3,
        )
        operands = [array(dtype, tokens, hidden), array("int32", tokens, top_k), array("float32", tokens, top_k)]
    else:
        call = jax.jit(lambda *operands: kernels.combine(*operands, ranks, units), donate_argnums=3)
        operands = [array(dtype, ranks, tokens, hidden), array("int32", ranks), array("int32", tokens, ranks)]
    jax.export.export(call, platforms=["cuda"], disabled_checks=checks)(*operands, epochs)


if __name__ == "__main__":
    for number, argument in enumerate(sys.argv[1:]):
        case = json.loads(argument)
        if len(case) == 8:
            from tests.kernels import exchange_ranks as exchange

            compiled = exchange.compiled_combine if case[0] == "combine" else exchange.compiled_dispatch
            compiled(exchange.Shape(*case[1:7], mxfp8=case[0] == "dispatch MXFP8"), max_blocks=case[7])
        else:
            lower(*case)
        if "CUTE_DSL_DUMP_DIR" in os.environ:
            # Cases of like operands have one name, by which the next would be written over this one.
            for path in Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("cutlass*.ptx"):
                path.rename(path.with_name(f"{number}.ptx"))
        print(f"compiled {case}", flush=True)
