"""What number formats cost a model on a text: `evaluate(model, ids)`."""

from qwenjax.evaluate.fake_quantise import fake_quantised
from qwenjax.evaluate.report import format_table, to_json
from qwenjax.evaluate.run import Evaluation, Result, Variant, all_variants, evaluate

__all__ = ["Evaluation", "Result", "Variant", "all_variants", "evaluate", "fake_quantised", "format_table", "to_json"]
