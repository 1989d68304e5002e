"""Evaluation: evaluators, metrics, predictions and results."""

from .build import (
    EVALUATOR_REGISTRY,
    MetricsEvaluator,
    build_evaluator,
    build_metrics,
    check_metrics,
)
from .evaluator import DatasetEvaluator, DatasetEvaluators, evaluation_context, inference_context, inference_on_dataset
from .metrics import METRIC_REGISTRY, Accuracy, FunctionMetric, Loss, MeanMetric, Metric
from .predictions import prediction_rows, write_predictions
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
    "build_metrics",
    "check_metrics",
    "evaluation_context",
    "flatten_results_dict",
    "format_results",
    "inference_context",
    "inference_on_dataset",
    "prediction_rows",
    "print_csv_format",
    "verify_results",
    "write_predictions",
]
