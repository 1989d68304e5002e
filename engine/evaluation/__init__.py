"""Evaluation: evaluators, metrics, predictions and results."""

from .build import (
    EVALUATOR_REGISTRY,
    MetricsEvaluator,
    build_evaluator,
    build_metrics,
    check_evaluation,
    check_metrics,
    result_names,
)
from .columns import prediction_rows
from .evaluator import DatasetEvaluator, DatasetEvaluators, evaluation_context, inference_context, inference_on_dataset
from .function_metric import FunctionMetric
from .metrics import METRIC_REGISTRY, Accuracy, Loss, MeanMetric, MeanSquaredError, Metric
from .predictions import predict_dataset, write_predictions
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
    "MeanSquaredError",
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
    "predict_dataset",
    "prediction_rows",
    "print_csv_format",
    "result_names",
    "verify_results",
    "write_predictions",
]
