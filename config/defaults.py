"""All configuration keys: defaults and meaning.

A *component* is a pair of keys: ``NAME`` (an entry of a registry, or ``"package.module:Name"``) and ``ARGS`` (its
keyword arguments, checked against its signature). A *duration* is an int (iterations) or a string: ``"500it"``,
``"2ep"``, ``"30min"``, ``"2h"``; 0 means never.
"""

import os
from typing import Any

from .components import components, mixed_components, named_components
from .duration import Duration
from .errors import printable
from .node import CfgNode as CN
from .node import declare_defaults
from .values import MISSING, Typed, one_of


def _count(default: int, min: int = 0) -> Typed:
    """An int; the limit keeps products of two of them within 64 bits."""
    return Typed(default, int, min=min, max=10**9)


def _number(default: float | None, max: float | None = None) -> Typed:
    """A finite number >= 0; None is allowed if it is the default."""
    return Typed(default, float, min=0, max=max)


_C = CN()

# Increased when a key changes its meaning.
_C.VERSION = 1
# Folder for all files of the run.
_C.OUTPUT_DIR = "./output"
# Seed of python, numpy, torch and the data order. Negative: a random seed, which is logged.
_C.SEED = Typed(-1, int, max=2**63 - 1)
# Try a run: train on this many batches, evaluate this many of each test set, write no files. 0: off.
_C.FAST_DEV_RUN = _count(0)
# torch.backends.cudnn.benchmark (faster for inputs of one size, not deterministic).
_C.CUDNN_BENCHMARK = False
# torch.use_deterministic_algorithms. An operation without a deterministic version is an error, or a warning ("warn").
_C.DETERMINISTIC = Typed(False, one_of(False, True, "warn"))
# torch.set_float32_matmul_precision: "" (do not change it), "highest", "high" (TF32), "medium" (bfloat16).
_C.FLOAT32_PRECISION = Typed("", one_of("", "highest", "high", "medium"))
# Extra hooks, each {NAME: ..., ARGS: {...}} (HOOK_REGISTRY). Only best checkpoint, bar and writer come after them.
_C.HOOKS = Typed([], components)

# ---------------------------------------------------------------------------- model
_C.MODEL = CN()
# "auto": the first available one of cuda, mps, cpu.
_C.MODEL.DEVICE = "auto"
# A component of MODEL_REGISTRY.
_C.MODEL.NAME = ""
_C.MODEL.ARGS = CN(new_allowed=True)
# Initial weights, or with --eval-only the weights to evaluate: a checkpoint, a state dict, a safetensors file, the
# folder of a run or one in Hugging Face's layout, or a URI (docs/checkpoints.md).
_C.MODEL.WEIGHTS = ""
# Which weights of a checkpoint: "model", "averaged" (of EMA or SWA), or "auto": those that the run evaluated.
_C.MODEL.WEIGHTS_FROM = Typed("auto", one_of("auto", "model", "averaged"))
# Also load the optimizer's state from WEIGHTS, such as momentum. Everything else starts from its beginning.
_C.MODEL.WEIGHTS_OPTIMIZER = False
# True: WEIGHTS must match the model exactly. False: weights that do not match are skipped and logged.
_C.MODEL.WEIGHTS_STRICT = False
# A component of LOSS_REGISTRY, called as loss(model(x), y) on batches (x, y), (x1, x2, y), dicts, dataclasses.
# Empty: the model receives the batch and returns its losses.
_C.MODEL.LOSS = CN()
_C.MODEL.LOSS.NAME = ""
_C.MODEL.LOSS.ARGS = CN(new_allowed=True)
# How the model receives a batch's inputs: "batch" (one argument), "tuple" (one argument each), "kwargs" (entries of a
# dict or dataclass that forward() takes by name) or "auto" (by forward()'s signature; docs/models.md).
_C.MODEL.INPUTS = Typed("auto", one_of("auto", "batch", "tuple", "kwargs"))
# For dict batches whose names differ from forward()'s: {entry: parameter}. INPUTS is then "kwargs".
_C.MODEL.INPUT_MAPPING = CN(new_allowed=True)
# For models that return several named outputs: {output: parameter of the loss}.
_C.MODEL.OUTPUT_MAPPING = CN(new_allowed=True)
# Name of the target in dict batches. Empty: the first of "label", "labels", "y", "target", "targets" in the batch.
_C.MODEL.TARGET = ""
# Store the weights of convolutions in channels-last order, which is faster on most devices.
_C.MODEL.CHANNELS_LAST = False
# Use torch.nn.SyncBatchNorm: statistics over the batches of all processes (GPUs only).
_C.MODEL.SYNC_BATCHNORM = False
# Submodules that recompute their activations in the backward pass, to save memory: their names ("blocks.0",
# "blocks.*") or class names ("TransformerBlock").
_C.MODEL.ACTIVATION_CHECKPOINTING = []
# Results in them that are kept, for less work and more memory: "matmul" (matrix products), "attention".
_C.MODEL.ACTIVATION_CHECKPOINTING_KEEP = []
# torch.compile the model, with these arguments. The first steps are slow. MODULES: compile only these submodules (as
# above), each on its own: the equal blocks of a deep model are compiled once.
_C.MODEL.COMPILE = CN()
_C.MODEL.COMPILE.ENABLED = False
_C.MODEL.COMPILE.MODULES = []
_C.MODEL.COMPILE.ARGS = CN(new_allowed=True)

# ---------------------------------------------------------------------------- data
_C.DATASETS = CN()
# Names of DATASET_REGISTRY, or components {NAME: ..., ARGS: {...}}. Several training sets are concatenated; with
# RATIO: 3 beside NAME, for each of them, their samples are mixed in that ratio.
_C.DATASETS.TRAIN = Typed((), mixed_components)
# Each is evaluated separately; its metrics are named "<set>/<metric>". {NAME: ..., ARGS: {...}, AS: "val_small"} gives
# a set a name of its own.
_C.DATASETS.TEST = Typed((), named_components)

_C.DATALOADER = CN()
# Samples in one iteration (one optimizer update), over all ranks and micro-batches.
_C.DATALOADER.BATCH_SIZE = _count(16, min=1)
# Samples in a test batch on each rank. 0: BATCH_SIZE.
_C.DATALOADER.TEST_BATCH_SIZE = _count(0)
# Loader workers per rank. 0: the training process reads the data, which is fastest for data in memory.
_C.DATALOADER.NUM_WORKERS = Typed(0, int, min=0, max=256)
# Makes a batch from a list of samples: a component of COLLATE_REGISTRY, or "package.module:function". Empty: the data
# set's collate_fn, or torch's default_collate. "pad_collate" pads sequences to the longest one.
_C.DATALOADER.COLLATE_FN = CN()
_C.DATALOADER.COLLATE_FN.NAME = ""
_C.DATALOADER.COLLATE_FN.ARGS = CN(new_allowed=True)
# The same for training data only, such as mixup. Empty: COLLATE_FN.
_C.DATALOADER.TRAIN_COLLATE_FN = CN()
_C.DATALOADER.TRAIN_COLLATE_FN.NAME = ""
_C.DATALOADER.TRAIN_COLLATE_FN.ARGS = CN(new_allowed=True)
# Batches in memory from which copies to a GPU overlap with computing. "auto": if MODEL.DEVICE is a GPU.
_C.DATALOADER.PIN_MEMORY = Typed("auto", one_of("auto", True, False))
# Batches that each worker reads ahead. 0: torch's default, 2.
_C.DATALOADER.PREFETCH_FACTOR = _count(0)
# Keep the workers of a training set between epochs. They keep their copy of it, which neither hooks nor set_epoch(...)
# then change. Those of an iterable data set never stay.
_C.DATALOADER.PERSISTENT_WORKERS = False
# Order of the training samples: a component of SAMPLER_REGISTRY.
# "EpochSampler" yields each sample once per epoch; "TrainingSampler" is an endless stream.
_C.DATALOADER.SAMPLER_TRAIN = "EpochSampler"
_C.DATALOADER.SAMPLER_ARGS = CN(new_allowed=True)
# Samples in an iteration by their lengths (the data set's "lengths") in place of BATCH_SIZE: as many of similar length
# as have this many tokens, padded, over all ranks. 0: BATCH_SIZE.
_C.DATALOADER.MAX_TOKENS = _count(0)
# Skip the last batch of an epoch if it is not full.
_C.DATALOADER.DROP_LAST = False
# Iterations per epoch, for data of unknown length: iterable data sets, and samplers such as "TrainingSampler". Data
# that ends earlier starts over. 0: one pass over the data.
_C.DATALOADER.ITERS_PER_EPOCH = _count(0)
# Maximum number of batches per epoch, and per test set on each rank. 0: all. Each epoch has other training batches;
# of an iterable data set with a length they are the first ones. Data of unknown length is read on.
_C.DATALOADER.LIMIT_TRAIN_BATCHES = _count(0)
_C.DATALOADER.LIMIT_TEST_BATCHES = _count(0)
# Train and evaluate only on this many first training batches, to test whether the model can learn them. 0: on all.
_C.DATALOADER.OVERFIT_BATCHES = _count(0)

# ---------------------------------------------------------------------------- optimisation
_C.SOLVER = CN()
# A component of OPTIMIZER_REGISTRY, or "package.module:Class". A name alone, such as "ADAMW", means {NAME: "AdamW"}.
_C.SOLVER.OPTIMIZER = CN()
_C.SOLVER.OPTIMIZER.NAME = "SGD"
_C.SOLVER.OPTIMIZER.ARGS = CN(new_allowed=True)
# The learning rate, which the schedule and the warm-up scale.
_C.SOLVER.BASE_LR = _number(0.001)
# For SGD. To set it in OPTIMIZER.ARGS, leave it here.
_C.SOLVER.MOMENTUM = _number(0.9, max=1)
_C.SOLVER.NESTEROV = False
# For any optimizer with weight decay. To set it in OPTIMIZER.ARGS, leave it here.
_C.SOLVER.WEIGHT_DECAY = _number(0.0001)
# Weight decay of normalisation layers' parameters. None: WEIGHT_DECAY.
_C.SOLVER.WEIGHT_DECAY_NORM = Typed(0.0, float, optional=True, min=0)
# Weight decay of biases. None: WEIGHT_DECAY.
_C.SOLVER.WEIGHT_DECAY_BIAS = _number(None)
# Learning rate of biases, as a multiple of BASE_LR.
_C.SOLVER.BIAS_LR_FACTOR = _number(1.0)
# Rules for single parameters: {PARAMS: pattern or REGEX: ..., LR_FACTOR: ..., WEIGHT_DECAY: ..., ARGS: {...}}.
# Each setting is that of the first rule that matches and has it (docs/optimization.md).
_C.SOLVER.PARAM_GROUPS = []
# An entry of LR_SCHEDULER_REGISTRY, or a scheduler of torch ("torch.optim.lr_scheduler:StepLR") or timm; and arguments
# beyond the keys below. Arguments that are numbers may be durations ("1ep"), "end", "epochs", "iters_per_epoch" or
# "max_iter" (docs/optimization.md).
_C.SOLVER.LR_SCHEDULER_NAME = "WarmupMultiStepLR"
_C.SOLVER.LR_SCHEDULER_ARGS = CN(new_allowed=True)
# When a scheduler of torch is stepped: after each "iteration" or "epoch".
_C.SOLVER.LR_SCHEDULER_INTERVAL = Typed("iteration", one_of("iteration", "epoch"))
# The metric of "torch.optim.lr_scheduler:ReduceLROnPlateau", stepped after evaluations. Empty: CHECKPOINT.BEST's.
_C.SOLVER.LR_SCHEDULER_METRIC = ""
# Multi-step: the learning rate is multiplied by GAMMA at each of STEPS (durations in iterations or epochs).
_C.SOLVER.GAMMA = _number(0.1)
_C.SOLVER.STEPS = Typed((30000,), Duration.parse_lengths)
# WarmupStepWithFixedGammaLR: GAMMA is applied this many times, at equal distances.
_C.SOLVER.NUM_DECAYS = _count(3)
# Cosine and linear: the final learning rate.
_C.SOLVER.BASE_LR_END = _number(0.0)
# Warm-up: starts at WARMUP_FACTOR * BASE_LR. Its length: a duration in iterations or epochs, or a fraction of the run,
# such as 0.1.
_C.SOLVER.WARMUP_FACTOR = _number(0.001)
_C.SOLVER.WARMUP_ITERS = Typed(1000, Duration.parse_part)
_C.SOLVER.WARMUP_METHOD = Typed("linear", one_of("linear", "constant", "exponential"))
# True: rescale the schedule to the iterations after the warm-up. False: the warm-up replaces its first iterations.
_C.SOLVER.RESCALE_INTERVAL = False

# Several optimizers, by name: {PARAMS: pattern}, and those of the keys above that differ for this
# optimizer and its schedule. Empty: one optimizer for all parameters (docs/optimization.md).
_C.SOLVER.OPTIMIZERS = CN(new_allowed=True)

# Length of the run: a duration in iterations or epochs.
_C.SOLVER.MAX_ITER = Typed(40000, Duration.parse_length)
# Number of micro-batches per batch.
_C.SOLVER.ACCUMULATION_STEPS = _count(1, min=1)
# World size that BATCH_SIZE, BASE_LR and lengths in iterations were chosen for; they are scaled to the actual one.
# 0: do not scale. See DefaultTrainer.auto_scale_workers.
_C.SOLVER.REFERENCE_WORLD_SIZE = _count(0)
# Period of checkpoints: a duration.
_C.SOLVER.CHECKPOINT_PERIOD = Typed(5000, Duration.parse)
# Time limit of each process of a run, such as "2h": training stops before it, with a checkpoint and exit code 75.
_C.SOLVER.TIME_LIMIT = Typed(0, Duration.parse_time)

# Gradient clipping: "value" (each element), "norm" (norm of all parameters; also "full_model") or "param_norm" (norm of
# each parameter).
_C.SOLVER.CLIP_GRADIENTS = CN()
_C.SOLVER.CLIP_GRADIENTS.ENABLED = False
_C.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = Typed("value", one_of("value", "norm", "param_norm", "full_model"))
_C.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 1.0
_C.SOLVER.CLIP_GRADIENTS.NORM_TYPE = 2.0

# A loss or a gradient that is NaN or infinite: "raise" an error; "skip" the update; "stop" training.
_C.SOLVER.NONFINITE_LOSS = Typed("raise", one_of("raise", "skip", "stop"))
# This many skipped updates in a row are an error. Float16 also skips some at the start.
_C.SOLVER.NONFINITE_LIMIT = _count(100, min=1)

# Mixed precision: forward and loss run under torch.autocast in DTYPE.
_C.SOLVER.AMP = CN()
_C.SOLVER.AMP.ENABLED = False
_C.SOLVER.AMP.DTYPE = Typed("bfloat16", one_of("bfloat16", "float16"))

# ---------------------------------------------------------------------------- evaluation
_C.TEST = CN()
# Period of evaluations during training: a duration. Test sets are also evaluated when the run is complete.
_C.TEST.EVAL_PERIOD = Typed(0, Duration.parse)
# Evaluate before the first step, too.
_C.TEST.EVAL_ON_START = False
# A component of EVALUATOR_REGISTRY, built for each test set. A name alone means {NAME: ...}.
_C.TEST.EVALUATOR = CN()
_C.TEST.EVALUATOR.NAME = "MetricsEvaluator"
_C.TEST.EVALUATOR.ARGS = CN(new_allowed=True)
# MetricsEvaluator's metrics: components of METRIC_REGISTRY, "torchmetrics:Name", or a function of all predictions and
# targets (docs/evaluation.md). AS gives one a name of its own, as for DATASETS.TEST.
_C.TEST.METRICS = Typed([], named_components)
# Arguments of model.generate(inputs, ...), such as max_new_tokens, for metrics and evaluators with the attribute
# generates = True, which get what it returns instead of the outputs of a forward pass. pad_token_id (0) also fills up
# the shorter ones.
_C.TEST.GENERATE = CN(new_allowed=True)
# Batches of each test set that are tried before training, so that errors of evaluation appear at once. 0: none.
_C.TEST.SANITY_CHECK_BATCHES = _count(2)
# Checked at the end: lists of [set, metric, expected value, tolerance]. If one is missed, the tools exit with 1.
_C.TEST.EXPECTED_RESULTS = []
# Format of --predict's files, OUTPUT_DIR/inference/<test set>/predictions.<format>: "jsonl" (an object per sample)
# or "npz" (an array per output of the model).
_C.TEST.PREDICTIONS_FORMAT = Typed("jsonl", one_of("jsonl", "npz"))
# Columns: "prediction" (all outputs; also if empty), "class", "class_name", "probability", "target", "file", or entries
# of dict batches.
_C.TEST.PREDICTIONS_COLUMNS = []
# Recompute batch-norm statistics from NUM_ITER training batches, at most one pass, before evaluations during training.
_C.TEST.PRECISE_BN = CN()
_C.TEST.PRECISE_BN.ENABLED = False
_C.TEST.PRECISE_BN.NUM_ITER = _count(200, min=1)
# Only False, for scripts of detectron2 that read it.
_C.TEST.AUG = CN()
_C.TEST.AUG.ENABLED = False

# ---------------------------------------------------------------------------- checkpoints
_C.CHECKPOINT = CN()
# Write checkpoints in the background. A step waits only for a copy of the state, which needs as much free host memory.
_C.CHECKPOINT.ASYNC = False
# Leave out the parameters that are frozen from the start: MODEL.WEIGHTS, or the model's constructor, gives them again.
# Sums of their bits are checked when a checkpoint is loaded.
_C.CHECKPOINT.TRAINABLE_ONLY = False
# If a file of the run cannot be written, after one retry: "stop" with an error, or "continue" training. The next
# checkpoint is then tried when it is due; rows of metrics are kept in memory until the next write.
_C.CHECKPOINT.ON_ERROR = Typed("stop", one_of("stop", "continue"))
# Number of periodic checkpoints to keep, the newest ones. 0: all.
_C.CHECKPOINT.MAX_TO_KEEP = _count(0)
# Full checkpoints for hookline replay, and for a resume that repeats few steps: rolling_0000999.pth every PERIOD, such
# as 200 or "10min", of which the newest KEEP stay. MAX_TO_KEEP does not count them. PERIOD 0: none.
_C.CHECKPOINT.ROLLING = CN()
_C.CHECKPOINT.ROLLING.PERIOD = Typed(0, Duration.parse)
_C.CHECKPOINT.ROLLING.KEEP = _count(1, min=1)
# model_best.pth: the checkpoint with the best value of METRIC, from an evaluation ("digits_test/accuracy") or any other
# logged metric ("total_loss"). Empty: no such file. EarlyStopping follows METRIC and MODE if it has no metric.
_C.CHECKPOINT.BEST = CN()
_C.CHECKPOINT.BEST.METRIC = ""
# "max": more is better. "min": less is better. "auto": by the metric's ``higher_is_better`` (torchmetrics),
# or else by METRIC's name: less of a loss, an error, a distance, a perplexity or a time, and more of anything else. The
# log says which.
_C.CHECKPOINT.BEST.MODE = Typed("auto", one_of("auto", "max", "min"))
# Period of looking at METRIC, besides after each evaluation, such as 500 or "1ep". 0: only after evaluations.
_C.CHECKPOINT.BEST.PERIOD = Typed(0, Duration.parse)
# How many of the best to keep, each as model_best_<iteration>.pth; model_best.pth is a link to the best of them.
_C.CHECKPOINT.BEST.KEEP = _count(1, min=1)
# At the end, load model_best.pth into the model, so that final results are those of the best weights.
_C.CHECKPOINT.LOAD_BEST_AT_END = False
# If a run fails, save the state of a finished step as model_exception.pth, for inspection. --resume ignores it.
_C.CHECKPOINT.ON_EXCEPTION = False

# ---------------------------------------------------------------------------- logging
_C.LOG = CN()
# Period of writing metrics: a duration. Losses are written as the mean over the period if it is in epochs or longer
# than 20 iterations, otherwise as the median over it; as the median of the last 20 iterations if it is a time.
_C.LOG.PERIOD = Typed(20, Duration.parse)
# Losses are recorded every this many iterations. Larger values only help steps of a few microseconds.
_C.LOG.GATHER_METRIC_PERIOD = _count(1, min=1)
# Log the norm of all gradients before clipping as grad_norm. Clipping by norm always logs it.
_C.LOG.GRAD_NORM = False
# Lowest level of messages on the console: "DEBUG", "INFO", "WARNING" or "ERROR". log.txt has all of them.
_C.LOG.LEVEL = Typed("INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR"))
# A progress bar in rank 0's terminal or notebook. Output to a file or pipe has none.
_C.LOG.PROGRESS_BAR = True
# Components of WRITER_REGISTRY.
_C.LOG.WRITERS = Typed(["CommonMetricPrinter", "JSONWriter", "TensorboardXWriter"], components)

# ---------------------------------------------------------------------------- processes
_C.PARALLEL = CN()
# How several processes train one model: a component of STRATEGY_REGISTRY. "auto": "ddp" for several processes.
_C.PARALLEL.NAME = "auto"
_C.PARALLEL.ARGS = CN(new_allowed=True)
# How long a rank waits for other ranks (start, collectives, barriers) before it fails: a time.
_C.PARALLEL.TIMEOUT = Typed("30min", Duration.parse_time)
_C.register_renamed_key("MODEL.META_ARCHITECTURE", "MODEL.NAME")
_C.register_renamed_key("SOLVER.IMS_PER_BATCH", "DATALOADER.BATCH_SIZE")
_GRAPHS = 'set it to True, and MODEL.COMPILE.ARGS.mode to "reduce-overhead", which captures CUDA graphs'
_C.register_renamed_key("SOLVER.CUDA_GRAPH", "MODEL.COMPILE.ENABLED", _GRAPHS)
_C.register_renamed_key("SOLVER.COMPILE_STEP", "MODEL.COMPILE.ENABLED")
_C.register_renamed_key("SOLVER.COMPILE_STEP_ARGS", "MODEL.COMPILE.ARGS")

declare_defaults(_C)
Config = CN  # for annotations


def get_cfg() -> CN:
    """Return a copy of the default config."""
    return _C.clone()


def resolved(path: str) -> CN:
    """Return the defaults with a config file, or with the ``config.yaml`` of a run's folder, merged into them.

    A run's own keys are kept, also those that its project adds to the config.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    cfg = get_cfg()
    if os.path.isdir(path):
        cfg.set_new_allowed(True)
    cfg.merge_from_file(path)
    return cfg


def differences(old: CN, new: CN) -> str:
    """Return a line for each key that differs, as ``KEY: old → new``; empty if none does."""
    pairs = new.diff(old).items()
    return "\n".join(printable(f"{key}: {_text(before)} → {_text(after)}") for key, (before, after) in pairs)


def _text(value: Any) -> str:
    if value is MISSING:
        return "(not set)"
    return f'"{value}"' if isinstance(value, str) else repr(value)
