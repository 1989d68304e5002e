"""Evaluation: evaluators, metrics, predictions and results."""

from .build import EVALUATOR_REGISTRY, MetricsEvaluator, build_evaluator
from .evaluator import DatasetEvaluator, DatasetEvaluators, evaluation_context, inference_context, inference_on_dataset
from .metrics import METRIC_REGISTRY, Accuracy, FunctionMetric, Loss, MeanMetric, Metric
from .predictions import write_predictions
from .testing import flatten_results_dict, format_results, print_csv_format, verify_results

__all__ = [
    "EVALUATOR_REGISTRY",
    "METRIC_REGISTRY",
    "Accuracy",
    "DatasetEvaluator",
    "DatasetEvaluators",
    "FunctionMetric",
    "Loss",
    "MeanMetric",
    "Metric",
    "MetricsEvaluator",
    "build_evaluator",
    "evaluation_context",
    "flatten_results_dict",
    "format_results",
    "inference_context",
    "inference_on_dataset",
    "print_csv_format",
    "verify_results",
    "write_predictions",
]
