"""Where detectron2's names are in hookline. Used by ``hookline.detectron2`` and ``tools/port_imports.py``.

``HOMES`` has a row for each module of detectron2 that can be imported: the modules of hookline, and the names that
each has. ``old=new`` is a name that is called ``new`` in hookline. ``REFUSED`` says of modules and names why they are
not here.
"""

import functools

__all__ = ["DETECTRON2_VERSION", "HOMES", "REFUSED", "homes_of"]

DETECTRON2_VERSION = "0.6"
"""The version of detectron2 whose names these are: ``detectron2.__version__``."""

_HOOKS = """
    AutogradProfiler BestCheckpointer CallbackHook EvalHook HookBase IterationTimer LRScheduler PeriodicCheckpointer
    PeriodicWriter PreciseBN TorchMemoryStats TorchProfiler
"""
_STORAGE = """
    CommonMetricPrinter EventStorage EventWriter JSONWriter TensorboardXWriter get_event_storage has_event_storage
"""
_TRAINERS = "AMPTrainer HookBase SimpleTrainer TrainerBase"
_DEFAULTS = "DefaultPredictor DefaultTrainer create_ddp_model default_argument_parser default_setup default_writers"
_COMM = """
    all_gather create_local_process_group gather get_local_process_group get_local_rank get_local_size get_rank
    get_world_size is_main_process reduce_dict shared_random_seed synchronize
"""
_EVALUATOR = "DatasetEvaluator DatasetEvaluators inference_context inference_on_dataset"
_CONFIG = "CfgNode configurable get_cfg global_cfg set_global_cfg"
_LAZY = "LazyCall LazyConfig"
_SAMPLERS = "InferenceSampler RandomSubsetTrainingSampler RepeatFactorTrainingSampler TrainingSampler"
_LOADERS = "build_batch_data_loader trivial_batch_collator worker_init_reset_seed"
_DATA_SETS = "DatasetFromList MapDataset ToIterableDataset"

HOMES: dict[str, dict[str, str]] = {
    "detectron2": {"hookline.detectron2.names": "__version__=DETECTRON2_VERSION"},
    "detectron2.checkpoint": {"hookline.engine.checkpoint": "Checkpointer DetectionCheckpointer PeriodicCheckpointer"},
    "detectron2.checkpoint.detection_checkpoint": {"hookline.engine.checkpoint": "DetectionCheckpointer"},
    "detectron2.config": {"hookline.config": f"{_CONFIG} {_LAZY} instantiate"},
    "detectron2.config.config": {"hookline.config": _CONFIG},
    "detectron2.config.defaults": {"hookline.config.defaults": "_C"},
    "detectron2.config.instantiate": {"hookline.config": "instantiate"},
    "detectron2.config.lazy": {"hookline.config": _LAZY},
    "detectron2.data": {"hookline.engine.data": f"{_DATA_SETS} build_batch_data_loader"},
    "detectron2.data.build": {"hookline.engine.data": f"{_LOADERS} {_DATA_SETS} AspectRatioGroupedDataset {_SAMPLERS}"},
    "detectron2.data.common": {"hookline.engine.data": f"{_DATA_SETS} AspectRatioGroupedDataset"},
    "detectron2.data.samplers": {"hookline.engine.data": f"{_SAMPLERS} GroupedBatchSampler"},
    "detectron2.data.samplers.distributed_sampler": {"hookline.engine.data": _SAMPLERS},
    "detectron2.data.samplers.grouped_batch_sampler": {"hookline.engine.data": "GroupedBatchSampler"},
    "detectron2.engine": {"hookline.engine": f"{_TRAINERS} {_DEFAULTS} {_HOOKS} DEFAULT_TIMEOUT hooks launch"},
    "detectron2.engine.defaults": {"hookline.engine": f"{_DEFAULTS} {_TRAINERS}"},
    "detectron2.engine.hooks": {"hookline.hooks": _HOOKS},
    "detectron2.engine.launch": {"hookline.engine.launch": "DEFAULT_TIMEOUT launch"},
    "detectron2.engine.train_loop": {"hookline.engine": _TRAINERS},
    "detectron2.evaluation": {"hookline.engine.evaluation": f"{_EVALUATOR} print_csv_format verify_results"},
    "detectron2.evaluation.evaluator": {"hookline.engine.evaluation": _EVALUATOR},
    "detectron2.evaluation.testing": {
        "hookline.engine.evaluation": "flatten_results_dict print_csv_format verify_results"
    },
    "detectron2.modeling": {"hookline.engine.modeling": "META_ARCH_REGISTRY build_model"},
    "detectron2.modeling.meta_arch": {"hookline.engine.modeling": "META_ARCH_REGISTRY build_model"},
    "detectron2.modeling.meta_arch.build": {"hookline.engine.modeling": "META_ARCH_REGISTRY build_model"},
    "detectron2.solver": {
        "hookline.engine.solver": """
            LRMultiplier LRScheduler WarmupCosineLR WarmupMultiStepLR WarmupParamScheduler build_lr_scheduler
            build_optimizer get_default_optimizer_params
        """
    },
    "detectron2.solver.build": {
        "hookline.engine.solver": """
            build_lr_scheduler build_optimizer get_default_optimizer_params maybe_add_gradient_clipping
            reduce_param_groups
        """,
        "hookline.engine.solver.param_groups": "_expand_param_groups",
    },
    "detectron2.solver.lr_scheduler": {
        "hookline.engine.solver": "LRMultiplier LRScheduler WarmupCosineLR WarmupMultiStepLR WarmupParamScheduler",
        "hookline.engine.solver.lr_scheduler": "_get_warmup_factor_at_iter",
    },
    "detectron2.utils": {},
    "detectron2.utils.analysis": {"fvcore.nn": "FlopCountAnalysis parameter_count parameter_count_table"},
    "detectron2.utils.collect_env": {"hookline.engine.compat.utils": "collect_env_info"},
    "detectron2.utils.comm": {"hookline.engine.comm": _COMM},
    "detectron2.utils.env": {"hookline.engine.compat.utils": "TORCH_VERSION seed_all_rng"},
    "detectron2.utils.events": {"hookline.hooks": f"{_STORAGE} HistoryBuffer _CURRENT_STORAGE_STACK"},
    "detectron2.utils.file_io": {"hookline.engine.compat.utils": "PathHandler PathManager"},
    "detectron2.utils.logger": {
        "hookline.engine.compat.utils": """
            create_small_table log_every_n log_every_n_seconds log_first_n setup_logger
        """
    },
    "detectron2.utils.memory": {"hookline.engine.compat.utils": "retry_if_cuda_oom"},
    "detectron2.utils.registry": {
        "hookline.config": "Registry locate",
        "hookline.config.lazy": "_convert_target_to_string=target_name",
    },
}

_REASONS = {
    "it is part of detection, and hookline has only the training engine": """
        _C data model_zoo modeling projects structures tracking utils.colormap utils.video_visualizer
        utils.visualizer
    """,
    "it lists detectron2's model zoo": "checkpoint.ModelCatalog checkpoint.catalog",
    "load() of hookline's Checkpointer matches the names of weights itself": "checkpoint.c2_model_loading",
    "hookline has no configs of earlier versions of detectron2": (
        "config.compat config.downgrade_config config.upgrade_config"
    ),
    (
        "register a function that returns the data set with DATASET_REGISTRY of hookline.engine.data, and name it"
        " in DATASETS.TRAIN"
    ): """
        data.DatasetCatalog data.catalog
    """,
    "class names and colours are part of detection; keep them in the data set": ("data.Metadata data.MetadataCatalog"),
    "loaders are measured by tools/benchmarks/run.py": "data.benchmark",
    (
        "it loads images with boxes. Override build_train_loader and build_test_loader of your trainer: "
        "build_batch_data_loader and MapDataset are in hookline.engine.data"
    ): """
        data.build.build_detection_test_loader data.build.build_detection_train_loader
        data.build_detection_test_loader data.build_detection_train_loader
    """,
    'call launch(): it chooses a free port for dist_url="auto", and starts and watches the ranks': (
        "engine.launch._distributed_worker engine.launch._find_free_port"
    ),
    "hookline has no evaluators for detection: subclass DatasetEvaluator": "evaluation",
    "use hookline.engine.export_weights or hookline export": "export",
    "layers are part of models: use torch.nn, and FrozenBatchNorm2d of torchvision.ops": "layers",
    "use FlopCountAnalysis of fvcore.nn, or the hook FlopsCounter": (
        "utils.analysis.activation_count_operators utils.analysis.flop_count_operators"
    ),
    "it is for detectron2's own tests": "utils.develop utils.testing",
    "it serves detectron2's documentation; remove the call": "utils.env.fixup_module_metadata",
    "hookline has no setup by environment variables": (
        "utils.env.setup_custom_environment utils.env.setup_environment"
    ),
    "hookline counts no usage; remove the call": "utils.logger._log_api_usage",
    "launch() and loaders pickle with Python's pickle": "utils.serialize",
    "compare TORCH_VERSION of hookline.engine.compat.utils": "utils.torch_version_utils",
    "use torch.export or hookline export": "utils.tracing",
}
"""Why modules and names of detectron2 are not here."""

REFUSED = {f"detectron2.{name}": reason for reason, names in _REASONS.items() for name in names.split()}


@functools.cache
def homes_of(module: str) -> dict[str, tuple[str, str]]:
    """Return the names of a module of detectron2, each with its module in hookline and its name there."""
    found = {}
    for home, names in HOMES.get(module, {}).items():
        for name in names.split():
            old, _, new = name.partition("=")
            found[old] = (home, new or old)
    return found
