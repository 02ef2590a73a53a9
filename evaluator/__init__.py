"""Honest measurement of a candidate against its reference."""

from evaluator.config import EvaluatorConfig
from evaluator.session import Evaluator, evaluate

__all__ = ["Evaluator", "EvaluatorConfig", "evaluate"]
