# Made by docs/schema.py from config/defaults.py.
from collections.abc import Sequence
from typing import Any, Literal

from .node import CfgNode

_C: Config

def get_cfg() -> Config: ...

class _MODEL_LOSS(CfgNode):
    NAME: str
    """A component of LOSS_REGISTRY, called as loss(model(x), y) on batches (x, y), (x1, x2, y) or dicts. Empty: the
    model receives the batch and returns its losses."""
    ARGS: CfgNode
    """A component of LOSS_REGISTRY, called as loss(model(x), y) on batches (x, y), (x1, x2, y) or dicts. Empty: the
    model receives the batch and returns its losses."""

class _MODEL_COMPILE(CfgNode):
    ENABLED: bool
    """torch.compile the model, with these arguments. The first steps are slow. MODULES: compile only these submodules
    (as above), each on its own: the equal blocks of a deep model are compiled once."""
    MODULES: list[Any]
    """torch.compile the model, with these arguments. The first steps are slow. MODULES: compile only these submodules
    (as above), each on its own: the equal blocks of a deep model are compiled once."""
    ARGS: CfgNode
    """torch.compile the model, with these arguments. The first steps are slow. MODULES: compile only these submodules
    (as above), each on its own: the equal blocks of a deep model are compiled once."""

class _MODEL(CfgNode):
    DEVICE: str
    """"auto": the first available one of cuda, mps, cpu."""
    NAME: str
    """A component of MODEL_REGISTRY."""
    ARGS: CfgNode
    """A component of MODEL_REGISTRY."""
    WEIGHTS: str
    """Initial weights, or with --eval-only the weights to evaluate: a checkpoint, a state dict, a safetensors file, the
    folder of a run or one in Hugging Face's layout, or a URI (docs/checkpoints.md)."""
    WEIGHTS_FROM: Literal["auto", "model", "averaged"]
    """Which weights of a checkpoint: "model", "averaged" (of EMA or SWA), or "auto": those that the run evaluated."""
    WEIGHTS_OPTIMIZER: bool
    """Also load the optimizer's state from WEIGHTS, such as momentum. Everything else starts from its beginning."""
    WEIGHTS_STRICT: bool
    """True: WEIGHTS must match the model exactly. False: weights that do not match are skipped and logged."""
    LOSS: _MODEL_LOSS
    """A component of LOSS_REGISTRY, called as loss(model(x), y) on batches (x, y), (x1, x2, y) or dicts. Empty: the
    model receives the batch and returns its losses."""
    INPUTS: Literal["auto", "batch", "tuple", "kwargs"]
    """How the model receives a batch's inputs: "batch" (one argument), "tuple" (one argument each), "kwargs" (dict
    entries that forward() takes by name) or "auto" (by forward()'s signature; docs/models.md)."""
    INPUT_MAPPING: CfgNode
    """For dict batches whose names differ from forward()'s: {entry: parameter}. INPUTS is then "kwargs"."""
    OUTPUT_MAPPING: CfgNode
    """For models that return several named outputs: {output: parameter of the loss}."""
    INPUT_FUNCTION: str
    """Functions ("package.module:function") that return the batch for model and loss from the loader's batch, and the
    output for loss and metrics from the model's."""
    OUTPUT_FUNCTION: str
    """Functions ("package.module:function") that return the batch for model and loss from the loader's batch, and the
    output for loss and metrics from the model's."""
    TRAIN_STEP: str
    """Methods of the model that are called with the batch instead of the model itself, if it has them."""
    PREDICT_STEP: str
    """Methods of the model that are called with the batch instead of the model itself, if it has them."""
    TARGET: str
    """Name of the target in dict batches. Empty: the first of "label", "labels", "y", "target", "targets" in the
    batch."""
    CHANNELS_LAST: bool
    """Store the weights of convolutions in channels-last order, which is faster on most devices."""
    SYNC_BATCHNORM: bool
    """Use torch.nn.SyncBatchNorm: statistics over the batches of all processes (GPUs only)."""
    FLOAT8: Literal["", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
    """Compute linear layers in float8 (torchao, GPUs of compute capability 8.9 or higher): "tensorwise", "rowwise",
    "rowwise_with_gw_hp". Compile the model too, or it is slower."""
    ACTIVATION_CHECKPOINTING: list[Any]
    """Submodules that recompute their activations in the backward pass, to save memory: their names ("blocks.0",
    "blocks.*") or class names ("TransformerBlock")."""
    COMPILE: _MODEL_COMPILE
    """torch.compile the model, with these arguments. The first steps are slow. MODULES: compile only these submodules
    (as above), each on its own: the equal blocks of a deep model are compiled once."""

class _DATASETS(CfgNode):
    TRAIN: Sequence[Any]
    """Names of DATASET_REGISTRY, or components {NAME: ..., ARGS: {...}}. Several training sets are concatenated."""
    TEST: Sequence[Any]
    """Each is evaluated separately; its metrics are named "<set>/<metric>". {NAME: ..., ARGS: {...}, AS: "val_small"}
    gives a set a name of its own, and EVAL_PERIOD: "5ep" a period of its own in place of TEST.EVAL_PERIOD."""

class _DATALOADER_COLLATE_FN(CfgNode):
    NAME: str
    """Makes a batch from a list of samples: a component of COLLATE_REGISTRY, or "package.module:function". Empty: the
    data set's collate_fn, or torch's default_collate. "pad_collate" pads sequences to the longest one."""
    ARGS: CfgNode
    """Makes a batch from a list of samples: a component of COLLATE_REGISTRY, or "package.module:function". Empty: the
    data set's collate_fn, or torch's default_collate. "pad_collate" pads sequences to the longest one."""

class _DATALOADER(CfgNode):
    BATCH_SIZE: int
    """Samples in one iteration (one optimizer update), over all ranks and micro-batches."""
    TEST_BATCH_SIZE: int
    """Samples in a test batch on each rank. 0: BATCH_SIZE."""
    NUM_WORKERS: int
    """Loader workers per rank. 0: the training process reads the data, which is fastest for data in memory."""
    COLLATE_FN: _DATALOADER_COLLATE_FN
    """Makes a batch from a list of samples: a component of COLLATE_REGISTRY, or "package.module:function". Empty: the
    data set's collate_fn, or torch's default_collate. "pad_collate" pads sequences to the longest one."""
    PIN_MEMORY: Literal["auto", True, False]
    """Batches in memory from which copies to a GPU overlap with computing. "auto": if MODEL.DEVICE is a GPU."""
    PREFETCH_FACTOR: int
    """Batches that each worker reads ahead. 0: torch's default, 2."""
    PERSISTENT_WORKERS: bool
    """Keep the workers of a training set between epochs. Those of an iterable data set never stay."""
    SAMPLER_TRAIN: str
    """Order of the training samples: a component of SAMPLER_REGISTRY. "EpochSampler" yields each sample once per epoch;
    "TrainingSampler" is an endless stream."""
    SAMPLER_ARGS: CfgNode
    """Order of the training samples: a component of SAMPLER_REGISTRY. "EpochSampler" yields each sample once per epoch;
    "TrainingSampler" is an endless stream."""
    DROP_LAST: bool
    """Skip the last batch of an epoch if it is not full."""
    ITERS_PER_EPOCH: int
    """Iterations per epoch, for data of unknown length: iterable data sets, and samplers such as "TrainingSampler".
    Data that ends earlier starts over. 0: one pass over the data."""
    LIMIT_TRAIN_BATCHES: int
    """Maximum number of batches per epoch, and per test set on each rank. 0: all. Each epoch has other training
    batches; of an iterable data set they are the first ones."""
    LIMIT_TEST_BATCHES: int
    """Maximum number of batches per epoch, and per test set on each rank. 0: all. Each epoch has other training
    batches; of an iterable data set they are the first ones."""
    OVERFIT_BATCHES: int
    """Train and evaluate only on this many first training batches, to test whether the model can learn them. 0: on
    all."""
    FAST_FORWARD: bool
    """How a resume continues an iterable data set without state_dict(). True: read and discard the samples that were
    used. False: restart the epoch."""

class _SOLVER_OPTIMIZER(CfgNode):
    NAME: str
    """A component of OPTIMIZER_REGISTRY, or "package.module:Class". A name alone, such as "ADAMW", means {NAME:
    "AdamW"}."""
    ARGS: CfgNode
    """A component of OPTIMIZER_REGISTRY, or "package.module:Class". A name alone, such as "ADAMW", means {NAME:
    "AdamW"}."""

class _SOLVER_LAYER_DECAY(CfgNode):
    FACTOR: float
    """Layer-wise decay: the last of LAYERS (patterns, from input to output) has the full learning rate, and each layer
    before it FACTOR times that of the next."""
    LAYERS: list[Any]
    """Layer-wise decay: the last of LAYERS (patterns, from input to output) has the full learning rate, and each layer
    before it FACTOR times that of the next."""

class _SOLVER_CLIP_GRADIENTS(CfgNode):
    ENABLED: bool
    """Gradient clipping: "value" (each element), "norm" (norm of all parameters; also "full_model") or "param_norm"
    (norm of each parameter)."""
    CLIP_TYPE: Literal["value", "norm", "param_norm", "full_model"]
    """Gradient clipping: "value" (each element), "norm" (norm of all parameters; also "full_model") or "param_norm"
    (norm of each parameter)."""
    CLIP_VALUE: float
    """Gradient clipping: "value" (each element), "norm" (norm of all parameters; also "full_model") or "param_norm"
    (norm of each parameter)."""
    NORM_TYPE: float
    """Gradient clipping: "value" (each element), "norm" (norm of all parameters; also "full_model") or "param_norm"
    (norm of each parameter)."""

class _SOLVER_AMP(CfgNode):
    ENABLED: bool
    """Mixed precision: forward and loss run under torch.autocast in DTYPE."""
    DTYPE: Literal["bfloat16", "float16"]
    """Mixed precision: forward and loss run under torch.autocast in DTYPE."""

class _SOLVER(CfgNode):
    MAX_ITER: int | str
    """Length of the run: a duration in iterations or epochs."""
    ACCUMULATION_STEPS: int
    """Number of micro-batches per batch."""
    REFERENCE_WORLD_SIZE: int
    """World size that BATCH_SIZE, BASE_LR and lengths in iterations were chosen for; they are scaled to the actual one.
    0: do not scale. See DefaultTrainer.auto_scale_workers."""
    OPTIMIZER: _SOLVER_OPTIMIZER
    """A component of OPTIMIZER_REGISTRY, or "package.module:Class". A name alone, such as "ADAMW", means {NAME:
    "AdamW"}."""
    BASE_LR: float
    """The learning rate, which the schedule and the warm-up scale."""
    MOMENTUM: float
    """For SGD. To set it in OPTIMIZER.ARGS, leave it here."""
    NESTEROV: bool
    """For SGD. To set it in OPTIMIZER.ARGS, leave it here."""
    WEIGHT_DECAY: float
    """For any optimizer with weight decay. To set it in OPTIMIZER.ARGS, leave it here."""
    WEIGHT_DECAY_NORM: float | None
    """Weight decay of normalisation layers' parameters. None: WEIGHT_DECAY."""
    WEIGHT_DECAY_BIAS: float | None
    """Weight decay of biases. None: WEIGHT_DECAY."""
    BIAS_LR_FACTOR: float
    """Learning rate of biases, as a multiple of BASE_LR."""
    PARAM_GROUPS: list[Any]
    """Rules for single parameters: {PARAMS: pattern or REGEX: ..., LR_FACTOR: ..., WEIGHT_DECAY: ..., ARGS: {...}}.
    Each setting is that of the first rule that matches and has it (docs/optimization.md)."""
    LAYER_DECAY: _SOLVER_LAYER_DECAY
    """Layer-wise decay: the last of LAYERS (patterns, from input to output) has the full learning rate, and each layer
    before it FACTOR times that of the next."""
    OPTIMIZERS: CfgNode
    """Several optimizers, by name: {PARAMS: pattern, EVERY: 1}, and keys of SOLVER that differ for this optimizer and
    its schedule. Empty: one optimizer for all parameters (docs/optimization.md)."""
    LR_SCHEDULER_NAME: str
    """An entry of LR_SCHEDULER_REGISTRY, or a scheduler of torch ("torch.optim.lr_scheduler:StepLR") or timm; and
    arguments beyond the keys below. Arguments that are numbers may be durations ("1ep"), "end", "epochs",
    "iters_per_epoch" or "max_iter" (docs/optimization.md)."""
    LR_SCHEDULER_ARGS: CfgNode
    """An entry of LR_SCHEDULER_REGISTRY, or a scheduler of torch ("torch.optim.lr_scheduler:StepLR") or timm; and
    arguments beyond the keys below. Arguments that are numbers may be durations ("1ep"), "end", "epochs",
    "iters_per_epoch" or "max_iter" (docs/optimization.md)."""
    LR_SCHEDULER_INTERVAL: Literal["iteration", "epoch", "evaluation"]
    """When a scheduler of torch is stepped: after each "iteration", "epoch" or "evaluation"."""
    LR_SCHEDULER_METRIC: str
    """The metric of "torch.optim.lr_scheduler:ReduceLROnPlateau", stepped after evaluations. Empty:
    CHECKPOINT.BEST's."""
    GAMMA: float
    """Multi-step: the learning rate is multiplied by GAMMA at each of STEPS (durations in iterations or epochs)."""
    STEPS: Sequence[int | str]
    """Multi-step: the learning rate is multiplied by GAMMA at each of STEPS (durations in iterations or epochs)."""
    NUM_DECAYS: int
    """WarmupStepWithFixedGammaLR: GAMMA is applied this many times, at equal distances."""
    BASE_LR_END: float
    """Cosine and linear: the final learning rate."""
    WARMUP_FACTOR: float
    """Warm-up: starts at WARMUP_FACTOR * BASE_LR. Its length: a duration in iterations or epochs, or a fraction of the
    run, such as 0.1."""
    WARMUP_ITERS: float | str
    """Warm-up: starts at WARMUP_FACTOR * BASE_LR. Its length: a duration in iterations or epochs, or a fraction of the
    run, such as 0.1."""
    WARMUP_METHOD: Literal["linear", "constant", "exponential"]
    """Warm-up: starts at WARMUP_FACTOR * BASE_LR. Its length: a duration in iterations or epochs, or a fraction of the
    run, such as 0.1."""
    RESCALE_INTERVAL: bool
    """True: rescale the schedule to the iterations after the warm-up. False: the warm-up replaces its first
    iterations."""
    CHECKPOINT_PERIOD: int | str
    """Period of checkpoints: a duration."""
    TIME_LIMIT: int | str
    """Time limit of each process of a run, such as "2h": training stops before it, with a checkpoint and exit code
    75."""
    CLIP_GRADIENTS: _SOLVER_CLIP_GRADIENTS
    """Gradient clipping: "value" (each element), "norm" (norm of all parameters; also "full_model") or "param_norm"
    (norm of each parameter)."""
    NONFINITE_LOSS: Literal["raise", "skip", "stop"]
    """A loss or a gradient that is NaN or infinite: "raise" an error; "skip" the update; "stop" training."""
    NONFINITE_LIMIT: int
    """This many skipped updates in a row are an error. Float16 also skips some at the start."""
    AMP: _SOLVER_AMP
    """Mixed precision: forward and loss run under torch.autocast in DTYPE."""
    COMPILE_STEP: bool
    """Compile forward, backward and update of a step into one graph, with these arguments of torch.compile. For long
    runs of small models (docs/performance.md): compiling takes about 20 s per batch shape. Hooks with events inside the
    step are an error."""
    COMPILE_STEP_ARGS: CfgNode
    """Compile forward, backward and update of a step into one graph, with these arguments of torch.compile. For long
    runs of small models (docs/performance.md): compiling takes about 20 s per batch shape. Hooks with events inside the
    step are an error."""
    CUDA_GRAPH: bool
    """Capture the step in a CUDA graph and replay it for batches of the most frequent shape. CUDA only."""

class _TEST_EVALUATOR(CfgNode):
    NAME: str
    """A component of EVALUATOR_REGISTRY, built for each test set. A name alone means {NAME: ...}."""
    ARGS: CfgNode
    """A component of EVALUATOR_REGISTRY, built for each test set. A name alone means {NAME: ...}."""

class _TEST_PRECISE_BN(CfgNode):
    ENABLED: bool
    """Recompute batch-norm statistics from NUM_ITER training batches, at most one pass, before evaluations during
    training."""
    NUM_ITER: int
    """Recompute batch-norm statistics from NUM_ITER training batches, at most one pass, before evaluations during
    training."""

class _TEST_AUG(CfgNode):
    ENABLED: bool
    """Only False, for scripts of detectron2 that read it."""

class _TEST(CfgNode):
    EVAL_PERIOD: int | str
    """Period of evaluations during training: a duration. Test sets are also evaluated when the run is complete."""
    EVAL_ON_START: bool
    """Evaluate before the first step, too."""
    EVALUATOR: _TEST_EVALUATOR
    """A component of EVALUATOR_REGISTRY, built for each test set. A name alone means {NAME: ...}."""
    METRICS: list[Any]
    """MetricsEvaluator's metrics: components of METRIC_REGISTRY, "torchmetrics:Name", or a function of all predictions
    and targets (docs/evaluation.md). AS gives one a name of its own, as for DATASETS.TEST."""
    INPUT_FUNCTION: str
    """In evaluation and prediction, in place of MODEL.INPUT_FUNCTION and MODEL.OUTPUT_FUNCTION. Empty: those."""
    OUTPUT_FUNCTION: str
    """In evaluation and prediction, in place of MODEL.INPUT_FUNCTION and MODEL.OUTPUT_FUNCTION. Empty: those."""
    PRECISION: Literal["", "bfloat16", "float16"]
    """torch.autocast of evaluation and prediction: "bfloat16" or "float16". Empty: none, whatever SOLVER.AMP is."""
    SANITY_CHECK_BATCHES: int
    """Batches of each test set that are tried before training, so that errors of evaluation appear at once. 0: none."""
    EXPECTED_RESULTS: list[Any]
    """Checked at the end: lists of [set, metric, expected value, tolerance]. If one is missed, the tools exit with
    1."""
    PREDICTIONS_FORMAT: str
    """Format of --predict's files, OUTPUT_DIR/inference/<test set>/predictions.<format>: "jsonl" (an object per
    sample), "csv" (a table) or "npz" (an array per output of the model)."""
    PREDICTIONS_COLUMNS: list[Any]
    """Columns: "prediction" (all outputs; also if empty), "class", "class_name", "probability", "target", "file", or
    entries of dict batches."""
    PRECISE_BN: _TEST_PRECISE_BN
    """Recompute batch-norm statistics from NUM_ITER training batches, at most one pass, before evaluations during
    training."""
    AUG: _TEST_AUG
    """Only False, for scripts of detectron2 that read it."""

class _CHECKPOINT_ROLLING(CfgNode):
    PERIOD: int | str
    """Full checkpoints for hookline replay, and for a resume that repeats few steps: rolling_0000999.pth every PERIOD,
    such as 200 or "10min", of which the newest KEEP stay. MAX_TO_KEEP does not count them. PERIOD 0: none."""
    KEEP: int
    """Full checkpoints for hookline replay, and for a resume that repeats few steps: rolling_0000999.pth every PERIOD,
    such as 200 or "10min", of which the newest KEEP stay. MAX_TO_KEEP does not count them. PERIOD 0: none."""

class _CHECKPOINT_BEST(CfgNode):
    METRIC: str
    """model_best.pth: the checkpoint with the best value of METRIC, from an evaluation ("digits_test/accuracy") or any
    other logged metric ("total_loss"). Empty: no such file. EarlyStopping follows METRIC and MODE if it has no
    metric."""
    MODE: Literal["max", "min"]
    """model_best.pth: the checkpoint with the best value of METRIC, from an evaluation ("digits_test/accuracy") or any
    other logged metric ("total_loss"). Empty: no such file. EarlyStopping follows METRIC and MODE if it has no
    metric."""
    PERIOD: int | str
    """Period of looking at METRIC, besides after each evaluation, such as 500 or "1ep". 0: only after evaluations."""
    KEEP: int
    """How many of the best to keep, each as model_best_<iteration>.pth; model_best.pth is a link to the best of
    them."""

class _CHECKPOINT(CfgNode):
    ASYNC: bool
    """Write checkpoints in the background. A step waits only for a copy of the state, which needs as much free host
    memory."""
    ON_ERROR: Literal["stop", "continue"]
    """If a file of the run cannot be written, after one retry: "stop" with an error, or "continue" training. The next
    checkpoint is then tried when it is due; rows of metrics are kept in memory until the next write."""
    MAX_TO_KEEP: int
    """Number of periodic checkpoints to keep, the newest ones. 0: all."""
    ROLLING: _CHECKPOINT_ROLLING
    """Full checkpoints for hookline replay, and for a resume that repeats few steps: rolling_0000999.pth every PERIOD,
    such as 200 or "10min", of which the newest KEEP stay. MAX_TO_KEEP does not count them. PERIOD 0: none."""
    BEST: _CHECKPOINT_BEST
    """model_best.pth: the checkpoint with the best value of METRIC, from an evaluation ("digits_test/accuracy") or any
    other logged metric ("total_loss"). Empty: no such file. EarlyStopping follows METRIC and MODE if it has no
    metric."""
    LOAD_BEST_AT_END: bool
    """At the end, load model_best.pth into the model, so that final results are those of the best weights."""
    ON_EXCEPTION: bool
    """If a run fails, save the state of a finished step as model_exception.pth, for inspection. --resume ignores it."""

class _LOG(CfgNode):
    PERIOD: int | str
    """Period of writing metrics: a duration. Losses are written as the mean over the period if it is in epochs or
    longer than 20 iterations, otherwise as the median over it; as the median of the last 20 iterations if it is a
    time."""
    GATHER_METRIC_PERIOD: int
    """Losses are recorded every this many iterations. Larger values only help steps of a few microseconds."""
    TRAIN_METRICS: list[Any]
    """Metrics of the batches of training, as TEST.METRICS. They are logged like losses, as "train/<metric>"."""
    GRAD_NORM: bool
    """Log the norm of all gradients before clipping as grad_norm. Clipping by norm always logs it."""
    LEVEL: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    """Lowest level of messages on the console: "DEBUG", "INFO", "WARNING" or "ERROR". log.txt has all of them."""
    PROGRESS_BAR: Literal["auto", True, False]
    """A progress bar in rank 0's terminal or notebook. "auto": if rich is installed. Output to a file or pipe has
    none."""
    CURVES: Literal["auto", True, False]
    """Draw curves.png at the end of a run. "auto": after a minute or more of training, with matplotlib, not in CI."""
    WRITERS: list[Any]
    """Components of WRITER_REGISTRY."""

class _PARALLEL(CfgNode):
    NAME: str
    """How several processes train one model: a component of STRATEGY_REGISTRY. "auto": "ddp" for several processes."""
    ARGS: CfgNode
    """How several processes train one model: a component of STRATEGY_REGISTRY. "auto": "ddp" for several processes."""
    TIMEOUT: int | str
    """How long a rank waits for other ranks (start, collectives, barriers) before it fails: a time."""

class Config(CfgNode):
    VERSION: int
    """Increased when a key changes its meaning."""
    OUTPUT_DIR: str
    """Folder for all files of the run."""
    SEED: int
    """Seed of python, numpy, torch and the data order. Negative: a random seed, which is logged."""
    FAST_DEV_RUN: int
    """Try a run: train on this many batches, evaluate this many of each test set, write no files. 0: off.
    --fast-dev-run: 1."""
    CUDNN_BENCHMARK: bool
    """torch.backends.cudnn.benchmark (faster for inputs of one size, not deterministic)."""
    DETERMINISTIC: Literal[False, True, "warn"]
    """torch.use_deterministic_algorithms. An operation without a deterministic version is an error, or a warning
    ("warn")."""
    FLOAT32_PRECISION: Literal["", "highest", "high", "medium"]
    """torch.set_float32_matmul_precision: "" (do not change it), "highest", "high" (TF32), "medium" (bfloat16)."""
    HOOKS: list[Any]
    """Extra hooks, each {NAME: ..., ARGS: {...}} (HOOK_REGISTRY). Only best checkpoint, bar and writer come after
    them."""
    MODEL: _MODEL
    DATASETS: _DATASETS
    DATALOADER: _DATALOADER
    SOLVER: _SOLVER
    TEST: _TEST
    CHECKPOINT: _CHECKPOINT
    LOG: _LOG
    PARALLEL: _PARALLEL
    def clone(self) -> Config: ...
