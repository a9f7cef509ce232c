"""The devices that tests run on: eight fake CPU devices, or this machine's GPUs where the run selects `-m gpu`."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from importlib.util import find_spec

import pytest

FAKE_CPU_DEVICES = 8

# The tests' time goes into compiling. A small LLM and its nine programs, CPU time: 21 s as users have it, 14 s without
# LLVM's optimisation, 5 s where the code of fusions is not made through MLIR either, which JAX 0.10 can do without.
QUICK_COMPILING = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    QUICK_COMPILING += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]

# Wholly held against torch or transformers, which the lane of the newest JAX does without.
collect_ignore = (
    []
    if find_spec("torch") and find_spec("transformers")
    else [
        "qwenjax/sampling/test_process.py",
        "qwenjax/test_convert.py",
        "qwenjax/test_safetensors.py",
        "qwenjax/test_tokenizer.py",
    ]
)


def selects_gpu(mark_expression: str) -> bool:
    """Whether a `-m` expression asks for the tests marked gpu: "gpu", "slow and gpu", but not "not gpu"."""
    return re.search(r"(?<!not )\bgpu\b", mark_expression) is not None


def pytest_configure(config: pytest.Config) -> None:
    # Before the first import of JAX by any test: backends read both settings when they start, and only then.
    gpu = selects_gpu(config.option.markexpr)
    if not gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILING))
        # Tests that build the same program share it.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "programs"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    # Ranks on streams of one GPU wait for one another, and may not be queued behind each other: more than 8 queues.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    import jax

    jax.config.update("jax_num_cpu_devices", FAKE_CPU_DEVICES)
    if gpu and jax.default_backend() != "gpu":
        raise pytest.UsageError("-m gpu: JAX sees no NVIDIA GPU here; install the cuda12 or cuda13 extra")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Reached only by a run that selects every test, such as -m "": the default deselects these.
    if not selects_gpu(config.option.markexpr):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="GPU tests run with -m gpu"))
