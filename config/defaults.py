"""Every configuration key, once: its default, and what it means.

A *component* is a pair of keys, ``NAME`` (an entry of a registry, or ``"package.module:Name"``) and
``ARGS`` (its keyword arguments, checked against its signature before anything starts). A *duration* is an
int (iterations) or a string: ``"500it"``, ``"2ep"``, ``"30min"``, ``"2h"``; 0 means never.
"""

from .duration import Duration
from .node import CfgNode as CN
from .node import Typed, components, one_of


def _count(default: int, least: int = 0) -> Typed:
    """A whole number; products of two of them fit into 64 bits."""
    return Typed(default, int, least=least, most=10**9)


def _number(default: float | None, most: float | None = None) -> Typed:
    """A finite number that is not negative; or None, if that is the default."""
    return Typed(default, float, least=0, most=most)


_C = CN()

# Version of the keys' meaning, bumped when a key changes its meaning.
_C.VERSION = 1

# Where a run keeps everything it writes.
_C.OUTPUT_DIR = "./output"

# Seed of python, numpy, torch and the data order. Negative: a random one is drawn, and logged.
_C.SEED = Typed(-1, int, most=2**63 - 1)

# Let cuDNN time its algorithms and choose (faster for inputs of one size, not deterministic).
_C.CUDNN_BENCHMARK = False

# torch.set_float32_matmul_precision: "" (leave it), "highest", "high" (TF32), "medium" (bfloat16).
_C.FLOAT32_PRECISION = Typed("", one_of("", "highest", "high", "medium"))

# Extra hooks, each {NAME: ..., ARGS: {...}} (HOOK_REGISTRY), after the default ones. Several of a kind may stand here.
_C.HOOKS = Typed([], components)

# ---------------------------------------------------------------------------- model
_C.MODEL = CN()
# "auto" takes cuda, then mps, then cpu: the first there is.
_C.MODEL.DEVICE = "auto"
# A component of MODEL_REGISTRY.
_C.MODEL.NAME = ""
_C.MODEL.ARGS = CN(new_allowed=True)
# Weights that the run starts from (or, with --eval-only, that are evaluated): a checkpoint, a state dict, a safetensors
# file, the folder of a run or one in Hugging Face's layout, or a URI (docs/checkpoints.md).
_C.MODEL.WEIGHTS = ""
# Which of a checkpoint's weights: the "model"'s, the "averaged" ones of a hook (EMA, SWA), or "auto": the averaged ones
# if the run that wrote them evaluated them, else the model's.
_C.MODEL.WEIGHTS_FROM = Typed("auto", one_of("auto", "model", "averaged"))
# Whether WEIGHTS must be the model's weights exactly. If not, what does not fit is left out, and logged.
_C.MODEL.WEIGHTS_STRICT = False
# A component of LOSS_REGISTRY, called as loss(model(x), y) on batches (x, y), (x1, x2, y) or dicts.
# Empty: the model is given the batch, and returns its losses itself.
_C.MODEL.LOSS = CN()
_C.MODEL.LOSS.NAME = ""
_C.MODEL.LOSS.ARGS = CN(new_allowed=True)
# What the model is given of a batch's inputs: "batch" (all in one argument), "tuple" (one argument each), "kwargs"
# (entries of a dict, those that forward() takes by name) or "auto" (what fits forward()'s signature; docs/models.md).
_C.MODEL.INPUTS = Typed("auto", one_of("auto", "batch", "tuple", "kwargs"))
# For dict batches, {entry: forward()'s parameter}, where the names differ. Then INPUTS is "kwargs".
_C.MODEL.INPUT_MAPPING = CN(new_allowed=True)
# {the model's output: the loss's parameter}, for models that return several outputs by name.
_C.MODEL.OUTPUT_MAPPING = CN(new_allowed=True)
# Name of the target in dict batches. Empty: "label", "labels", "y", "target" or "targets", whichever is there.
_C.MODEL.TARGET = ""
# Keep the weights of convolutions in channels-last order, the faster one on most devices.
_C.MODEL.CHANNELS_LAST = False
# Batch norms take their statistics over the batches of all processes together (torch.nn.SyncBatchNorm; GPUs only).
_C.MODEL.SYNC_BATCHNORM = False
# Submodules that compute their activations again in the backward pass instead of keeping them, which saves memory:
# their names ("blocks.0", "blocks.*") or their classes' ("TransformerBlock").
_C.MODEL.ACTIVATION_CHECKPOINTING = []
# torch.compile the model (slow first steps: for long runs), with these arguments.
_C.MODEL.COMPILE = CN()
_C.MODEL.COMPILE.ENABLED = False
_C.MODEL.COMPILE.ARGS = CN(new_allowed=True)

# ---------------------------------------------------------------------------- data
_C.DATASETS = CN()
# Names of DATASET_REGISTRY, or components {NAME: ..., ARGS: {...}}. Several training sets are concatenated.
_C.DATASETS.TRAIN = Typed((), components)
# Each is evaluated on its own; its metrics are named "<set>/<metric>".
_C.DATASETS.TEST = Typed((), components)

_C.DATALOADER = CN()
# Samples in one iteration (one optimizer update), over all ranks and micro-batches together.
_C.DATALOADER.BATCH_SIZE = _count(16, least=1)
# Samples a test batch, on each rank. 0: as many as BATCH_SIZE.
_C.DATALOADER.TEST_BATCH_SIZE = _count(0)
# Worker processes a rank, at most 64 or, if that is more, 8 for each CPU core. 0: data is read in the training process,
# the fastest for data in memory.
_C.DATALOADER.NUM_WORKERS = _count(0)
# Order of the training samples: a component of SAMPLER_REGISTRY.
# "EpochSampler" sees every sample once an epoch; "TrainingSampler" is one endless stream.
_C.DATALOADER.SAMPLER_TRAIN = "EpochSampler"
_C.DATALOADER.SAMPLER_ARGS = CN(new_allowed=True)
# Leave out the last batch of an epoch if it is not full.
_C.DATALOADER.DROP_LAST = False
# Iterations an epoch, where the data has no end to count them by: iterable data sets, and samplers such as
# "TrainingSampler". The data is started over when it ends, wherever in an epoch that is. 0: a pass over the data.
_C.DATALOADER.ITERS_PER_EPOCH = _count(0)
# Batches an epoch at most, other ones in each epoch; and batches of each test set on each rank. 0: all.
_C.DATALOADER.LIMIT_TRAIN_BATCHES = _count(0)
_C.DATALOADER.LIMIT_TEST_BATCHES = _count(0)
# Train on the samples of the first so many batches alone, to see whether the model can learn them. 0: on all.
_C.DATALOADER.OVERFIT_BATCHES = _count(0)
# A resume in the middle of an iterable data set that has no state_dict(): read and throw away what was seen already.
# False: start the epoch over.
_C.DATALOADER.FAST_FORWARD = True

# ---------------------------------------------------------------------------- optimisation
_C.SOLVER = CN()
# How long to train: a duration in iterations or epochs.
_C.SOLVER.MAX_ITER = Typed(40000, Duration.parse_length)
# Micro-batches that each iteration's batch is cut in.
_C.SOLVER.ACCUMULATION_STEPS = _count(1, least=1)

# World size that BATCH_SIZE, BASE_LR and the lengths in iterations were chosen for. If not 0, they are scaled to the
# world size there is, so that each rank keeps its share (see DefaultTrainer.auto_scale_workers).
_C.SOLVER.REFERENCE_WORLD_SIZE = _count(0)

# A component of OPTIMIZER_REGISTRY, or "package.module:Class".
_C.SOLVER.OPTIMIZER = CN()
_C.SOLVER.OPTIMIZER.NAME = "SGD"
_C.SOLVER.OPTIMIZER.ARGS = CN(new_allowed=True)
_C.SOLVER.BASE_LR = _number(0.001)
# Used by SGD where OPTIMIZER.ARGS says nothing else.
_C.SOLVER.MOMENTUM = _number(0.9, most=1)
_C.SOLVER.NESTEROV = False
# Used by any optimizer with weight decay where OPTIMIZER.ARGS says nothing else.
_C.SOLVER.WEIGHT_DECAY = _number(0.0001)
# Weight decay of normalisation layers' parameters. None: WEIGHT_DECAY.
_C.SOLVER.WEIGHT_DECAY_NORM = Typed(0.0, float, optional=True, least=0)
# Weight decay of biases. None: WEIGHT_DECAY.
_C.SOLVER.WEIGHT_DECAY_BIAS = _number(None)
# Learning rate of biases, as a multiple of BASE_LR.
_C.SOLVER.BIAS_LR_FACTOR = _number(1.0)

# An entry of LR_SCHEDULER_REGISTRY, or "torch.optim.lr_scheduler:Name"; its arguments, where it takes some
# beyond the keys below.
_C.SOLVER.LR_SCHEDULER_NAME = "WarmupMultiStepLR"
_C.SOLVER.LR_SCHEDULER_ARGS = CN(new_allowed=True)
# The metric that "torch.optim.lr_scheduler:ReduceLROnPlateau" goes by, such as "digits_test/loss", and nothing else
# does. It is stepped after each evaluation: every TEST.EVAL_PERIOD.
_C.SOLVER.LR_SCHEDULER_METRIC = ""
# Multi-step: the learning rate is multiplied by GAMMA at each of STEPS (durations in iterations or epochs).
_C.SOLVER.GAMMA = _number(0.1)
_C.SOLVER.STEPS = Typed((30000,), Duration.parse_lengths)
# WarmupStepWithFixedGammaLR: how many times GAMMA is applied, evenly spread.
_C.SOLVER.NUM_DECAYS = _count(3)
# Cosine and linear: the learning rate they end at.
_C.SOLVER.BASE_LR_END = _number(0.0)
# Warm-up: from WARMUP_FACTOR * BASE_LR on, for a duration in iterations or epochs.
_C.SOLVER.WARMUP_FACTOR = _number(0.001)
_C.SOLVER.WARMUP_ITERS = Typed(1000, Duration.parse_length)
_C.SOLVER.WARMUP_METHOD = Typed("linear", one_of("linear", "constant", "exponential"))
# Squeeze the schedule into what the warm-up leaves, instead of starting it at the warm-up's end.
_C.SOLVER.RESCALE_INTERVAL = False

# How often a checkpoint is written: a duration.
_C.SOLVER.CHECKPOINT_PERIOD = Typed(5000, Duration.parse)
# The time this job has, such as "2h", counted from the start of the process. Training stops, with a checkpoint and exit
# code 75, while there is time for that; a resumed run is another job, with the whole of it. 0: no limit.
_C.SOLVER.TIME_LIMIT = Typed(0, Duration.parse_time)

# Gradient clipping before each update: "value" (each element), "norm" (the global norm of all parameters
# together) or "param_norm" (the norm of each parameter by itself).
_C.SOLVER.CLIP_GRADIENTS = CN()
_C.SOLVER.CLIP_GRADIENTS.ENABLED = False
_C.SOLVER.CLIP_GRADIENTS.CLIP_TYPE = Typed("value", one_of("value", "norm", "param_norm"))
_C.SOLVER.CLIP_GRADIENTS.CLIP_VALUE = 1.0
_C.SOLVER.CLIP_GRADIENTS.NORM_TYPE = 2.0

# A loss or a gradient that is NaN or infinite: "raise" an error; "skip" the update; "stop" training.
_C.SOLVER.NONFINITE_LOSS = Typed("raise", one_of("raise", "skip", "stop"))
# So many iterations in a row whose update was skipped are an error. Float16 skips some at the start, too.
_C.SOLVER.NONFINITE_LIMIT = _count(100, least=1)

# Mixed precision: forward and loss run under torch.autocast in DTYPE.
_C.SOLVER.AMP = CN()
_C.SOLVER.AMP.ENABLED = False
_C.SOLVER.AMP.DTYPE = Typed("bfloat16", one_of("bfloat16", "float16"))

# Run forward, backward and update of a step as one graph that torch.compile makes, with these arguments of it besides
# fullgraph. For long runs of small models, whose steps are mostly overhead (docs/performance.md): making a graph takes
# some 20 seconds for each shape of batch. Hooks cannot look into the step: those that would are refused.
_C.SOLVER.COMPILE_STEP = False
_C.SOLVER.COMPILE_STEP_ARGS = CN(new_allowed=True)
# Capture the whole step in a CUDA graph and replay it for batches of the shape that most have. On CUDA only.
_C.SOLVER.CUDA_GRAPH = False

# ---------------------------------------------------------------------------- evaluation
_C.TEST = CN()
# How often the test sets are evaluated while training: a duration. They are always evaluated at the end.
_C.TEST.EVAL_PERIOD = Typed(0, Duration.parse)
# A component of EVALUATOR_REGISTRY, made for each test set.
_C.TEST.EVALUATOR = CN()
_C.TEST.EVALUATOR.NAME = "MetricsEvaluator"
_C.TEST.EVALUATOR.ARGS = CN(new_allowed=True)
# MetricsEvaluator's metrics: components of METRIC_REGISTRY, or "torchmetrics:Name".
_C.TEST.METRICS = Typed([], components)
# Checked at the end: lists of [set, metric, expected value, tolerance]; the tools exit with 1 when one is missed.
_C.TEST.EXPECTED_RESULTS = []
# How --predict writes predictions, as OUTPUT_DIR/inference/<test set>/predictions.<format>: "jsonl", an object a
# sample; "csv", a table; "npz", an array for each of the model's outputs.
_C.TEST.PREDICTIONS_FORMAT = "jsonl"
# Compute batch norm's statistics anew before each evaluation while training, from NUM_ITER batches of training data
# (at most one pass over them), instead of leaving the running averages of the steps before.
_C.TEST.PRECISE_BN = CN()
_C.TEST.PRECISE_BN.ENABLED = False
_C.TEST.PRECISE_BN.NUM_ITER = _count(200, least=1)

# ---------------------------------------------------------------------------- checkpoints
_C.CHECKPOINT = CN()
# Write checkpoints while training goes on: a step waits only for a copy of the state in memory, for which there must be
# room once more (in the host's memory, also where the model is on a GPU).
_C.CHECKPOINT.ASYNC = False
# When a file of the run (a checkpoint, metrics.json, metrics.csv, TensorBoard's) cannot be written, because the disk is
# full or the folder is gone, after a second try: "stop" with an error, or "continue" training. The next checkpoint is
# then tried when it is due; rows of metrics wait in memory for the next writing.
_C.CHECKPOINT.ON_ERROR = Typed("stop", one_of("stop", "continue"))
# Periodic checkpoints kept, the newest ones. 0: all.
_C.CHECKPOINT.MAX_TO_KEEP = _count(0)
# model_best.pth: the weights with the best value of METRIC, of an evaluation ("digits_test/accuracy") or of any other
# that is logged ("total_loss"). Empty: none is kept.
_C.CHECKPOINT.BEST = CN()
_C.CHECKPOINT.BEST.METRIC = ""
_C.CHECKPOINT.BEST.MODE = Typed("max", one_of("max", "min"))
# How often METRIC is looked at beside after each evaluation, such as 500 or "1ep". 0: after evaluations only.
_C.CHECKPOINT.BEST.PERIOD = Typed(0, Duration.parse)
# How many of the best to keep, each as model_best_<iteration>.pth; model_best.pth is a link to the best of them.
_C.CHECKPOINT.BEST.KEEP = _count(1, least=1)
# When training has ended, load model_best.pth into the model: final results are then of the best weights.
_C.CHECKPOINT.LOAD_BEST_AT_END = False
# When a run fails, save model_exception.pth, if the weights are those of a finished step. It is there to look into:
# --resume goes on from the last checkpoint before it, exactly.
_C.CHECKPOINT.ON_EXCEPTION = False

# ---------------------------------------------------------------------------- logging
_C.LOG = CN()
# How often metrics are written: a duration. Losses are reported as the median over the iterations in between.
_C.LOG.PERIOD = Typed(20, Duration.parse)
# Losses are put every so many iterations. They never wait for a device; this is for steps of a few microseconds.
_C.LOG.GATHER_METRIC_PERIOD = _count(1, least=1)
# A bar at the bottom of the terminal, of the first process, that costs the steps nothing. "auto": if rich is installed.
# A file or pipe never gets one, with True neither.
_C.LOG.PROGRESS_BAR = Typed("auto", one_of("auto", True, False))
# Components of WRITER_REGISTRY.
_C.LOG.WRITERS = Typed(["CommonMetricPrinter", "JSONWriter", "TensorboardXWriter"], components)

# ---------------------------------------------------------------------------- processes
_C.PARALLEL = CN()
# How several processes train one model: a component of STRATEGY_REGISTRY. "auto": "ddp" if there are several.
_C.PARALLEL.NAME = "auto"
_C.PARALLEL.ARGS = CN(new_allowed=True)
# How long a rank waits for the others, at the start, in collectives and at barriers, before it fails: a time.
_C.PARALLEL.TIMEOUT = Typed("30min", Duration.parse_time)

# Names that these keys have in detectron2.
_C.register_renamed_key("MODEL.META_ARCHITECTURE", "MODEL.NAME")
_C.register_renamed_key("SOLVER.IMS_PER_BATCH", "DATALOADER.BATCH_SIZE")


def get_cfg() -> CN:
    """A copy of the default configuration, to be changed and merged into freely."""
    return _C.clone()
