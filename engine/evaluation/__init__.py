"""Evaluation: evaluators, metrics, predictions and results."""

from typing import TYPE_CHECKING

from ...config.rare_names import imported_when_used
from .build import (
    EVALUATOR_REGISTRY,
    MetricsEvaluator,
    build_evaluator,
    build_metrics,
    check_evaluation,
    check_metrics,
    result_names,
)
from .evaluator import DatasetEvaluator, DatasetEvaluators, evaluation_context, inference_context, inference_on_dataset
from .metrics import METRIC_REGISTRY, Accuracy, FunctionMetric, Loss, MeanMetric, Metric
from .testing import flatten_results_dict, format_results, print_csv_format, verify_results

if TYPE_CHECKING:
    from .predictions import prediction_rows, write_predictions

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
    "check_evaluation",
    "check_metrics",
    "evaluation_context",
    "flatten_results_dict",
    "format_results",
    "inference_context",
    "inference_on_dataset",
    "prediction_rows",
    "print_csv_format",
    "result_names",
    "verify_results",
    "write_predictions",
]

__getattr__ = imported_when_used(__name__, dict.fromkeys(("prediction_rows", "write_predictions"), ".predictions"))
