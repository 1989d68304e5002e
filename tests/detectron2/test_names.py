"""detectron2's names: those of its engine are in hookline, and others are refused with a reason."""

from hookline.detectron2.finder import MODULES, describe, home_of

# By module of detectron2. Its submodules without a row have the names of their parent.
PRESENT = """
    checkpoint: Checkpointer DetectionCheckpointer PeriodicCheckpointer
    config: CfgNode LazyCall LazyConfig configurable get_cfg global_cfg instantiate set_global_cfg
    config.defaults: _C
    data: AspectRatioGroupedDataset DatasetFromList MapDataset ToIterableDataset build_batch_data_loader
    data.build: trivial_batch_collator worker_init_reset_seed
    data.samplers: GroupedBatchSampler InferenceSampler RandomSubsetTrainingSampler RepeatFactorTrainingSampler
    data.samplers: TrainingSampler
    engine: AMPTrainer AutogradProfiler BestCheckpointer CallbackHook DEFAULT_TIMEOUT DefaultPredictor
    engine: DefaultTrainer EvalHook HookBase IterationTimer LRScheduler PeriodicCheckpointer PeriodicWriter
    engine: PreciseBN SimpleTrainer TorchMemoryStats TorchProfiler TrainerBase create_ddp_model
    engine: default_argument_parser default_setup default_writers hooks launch
    engine.defaults: DefaultPredictor DefaultTrainer _highlight _try_get_key default_argument_parser
    engine.hooks: AutogradProfiler BestCheckpointer CallbackHook EvalHook HookBase IterationTimer LRScheduler
    engine.hooks: PeriodicCheckpointer PeriodicWriter PreciseBN TorchMemoryStats TorchProfiler
    engine.train_loop: AMPTrainer HookBase SimpleTrainer TrainerBase
    evaluation: DatasetEvaluator DatasetEvaluators inference_context inference_on_dataset print_csv_format
    evaluation: verify_results
    evaluation.testing: flatten_results_dict
    modeling: META_ARCH_REGISTRY build_model
    solver: LRMultiplier LRScheduler WarmupCosineLR WarmupMultiStepLR WarmupParamScheduler build_lr_scheduler
    solver: build_optimizer get_default_optimizer_params
    solver.build: _expand_param_groups maybe_add_gradient_clipping reduce_param_groups
    solver.lr_scheduler: _get_warmup_factor_at_iter
    utils.analysis: FlopCountAnalysis parameter_count parameter_count_table
    utils.collect_env: collect_env_info
    utils.comm: all_gather create_local_process_group gather get_local_process_group get_local_rank
    utils.comm: get_local_size get_rank get_world_size is_main_process reduce_dict shared_random_seed synchronize
    utils.env: TORCH_VERSION fixup_module_metadata seed_all_rng
    utils.events: CommonMetricPrinter EventStorage EventWriter HistoryBuffer JSONWriter TensorboardXWriter
    utils.events: _CURRENT_STORAGE_STACK get_event_storage has_event_storage
    utils.file_io: PathHandler PathManager
    utils.logger: _log_api_usage create_small_table log_every_n log_every_n_seconds log_first_n setup_logger
    utils.memory: retry_if_cuda_oom
    utils.registry: Registry locate
    utils.serialize: PicklableWrapper
"""
REFUSED = """
    data: DatasetCatalog DatasetMapper MetadataCatalog build_detection_train_loader detection_utils transforms
    data.build: get_detection_dataset_dicts print_instances_class_histogram
    engine.launch: _distributed_worker _find_free_port
    evaluation: COCOEvaluator SemSegEvaluator
    structures: Boxes Instances
    utils.analysis: activation_count_operators
    utils.visualizer: Visualizer
"""


def names(table):
    for line in table.strip().splitlines():
        module, _, found = line.strip().partition(":")
        yield from ((f"detectron2.{module}", name) for name in found.split())


def test_names_of_the_engine_are_here_and_those_of_detection_refused_with_a_reason():
    assert [f"{module}.{name}" for module, name in names(PRESENT) if home_of(module, name) is None] == []
    assert [f"{module}.{name}" for module, name in names(REFUSED) if home_of(module, name) is not None] == []
    assert all("own tools; use " in describe(f"{module}.{name}") for module, name in names(REFUSED))
    assert "use DATASET_REGISTRY" in describe("detectron2.data.catalog.DatasetCatalog")
    assert all(module == "detectron2" or module.rpartition(".")[0] in MODULES.split() for module in MODULES.split())
