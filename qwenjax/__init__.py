"""qwenjax: serving Qwen3 mixture-of-experts models in JAX."""

from qwenjax.llm import LLM
from qwenjax.outputs import CompletionOutput, RequestOutput
from qwenjax.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
