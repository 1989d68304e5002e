"""detectron2's names: those of its engine are in hookline, and others are refused with a reason."""

import pytest

from hookline.detectron2.finder import MODULES, describe, home_of

# Names that public projects import, and that are refused with a reason.
REFUSED = """
    checkpoint.c2_model_loading: align_and_update_state_dicts
    data: DatasetCatalog DatasetMapper MetadataCatalog build_detection_train_loader detection_utils transforms
    data.build: get_detection_dataset_dicts print_instances_class_histogram
    data.datasets: load_coco_json register_coco_instances
    engine.launch: _distributed_worker _find_free_port
    evaluation: COCOEvaluator SemSegEvaluator
    layers: Conv2d ShapeSpec cat
    model_zoo: get_config
    modeling: BACKBONE_REGISTRY ROI_HEADS_REGISTRY
    projects.deeplab: add_deeplab_config
    structures: Boxes Instances
    utils.analysis: activation_count_operators
    utils.visualizer: Visualizer
"""

PRESENT = """
    checkpoint: Checkpointer DetectionCheckpointer PeriodicCheckpointer
    checkpoint.detection_checkpoint: DetectionCheckpointer
    config: CfgNode LazyCall LazyConfig configurable get_cfg global_cfg instantiate set_global_cfg
    config.config: CfgNode configurable get_cfg global_cfg set_global_cfg
    config.defaults: _C
    config.instantiate: instantiate
    config.lazy: LazyCall LazyConfig
    data: DatasetFromList MapDataset ToIterableDataset build_batch_data_loader
    data.build: AspectRatioGroupedDataset DatasetFromList InferenceSampler MapDataset RandomSubsetTrainingSampler
    data.build: RepeatFactorTrainingSampler ToIterableDataset TrainingSampler build_batch_data_loader
    data.build: trivial_batch_collator worker_init_reset_seed
    data.common: AspectRatioGroupedDataset DatasetFromList MapDataset ToIterableDataset
    data.samplers: GroupedBatchSampler InferenceSampler RandomSubsetTrainingSampler RepeatFactorTrainingSampler
    data.samplers: TrainingSampler
    data.samplers.distributed_sampler: InferenceSampler RandomSubsetTrainingSampler RepeatFactorTrainingSampler
    data.samplers.distributed_sampler: TrainingSampler
    data.samplers.grouped_batch_sampler: GroupedBatchSampler
    engine: AMPTrainer AutogradProfiler BestCheckpointer CallbackHook DEFAULT_TIMEOUT DefaultPredictor
    engine: DefaultTrainer EvalHook HookBase IterationTimer LRScheduler PeriodicCheckpointer PeriodicWriter
    engine: PreciseBN SimpleTrainer TorchMemoryStats TorchProfiler TrainerBase create_ddp_model
    engine: default_argument_parser default_setup default_writers hooks launch
    engine.defaults: AMPTrainer DefaultPredictor DefaultTrainer HookBase SimpleTrainer TrainerBase
    engine.defaults: create_ddp_model default_argument_parser default_setup default_writers
    engine.hooks: AutogradProfiler BestCheckpointer CallbackHook EvalHook HookBase IterationTimer LRScheduler
    engine.hooks: PeriodicCheckpointer PeriodicWriter PreciseBN TorchMemoryStats TorchProfiler
    engine.launch: DEFAULT_TIMEOUT launch
    engine.train_loop: AMPTrainer HookBase SimpleTrainer TrainerBase
    evaluation: DatasetEvaluator DatasetEvaluators inference_context inference_on_dataset print_csv_format
    evaluation: verify_results
    evaluation.evaluator: DatasetEvaluator DatasetEvaluators inference_context inference_on_dataset
    evaluation.testing: flatten_results_dict print_csv_format verify_results
    modeling: META_ARCH_REGISTRY build_model
    modeling.meta_arch: META_ARCH_REGISTRY build_model
    modeling.meta_arch.build: META_ARCH_REGISTRY build_model
    solver: LRMultiplier LRScheduler WarmupCosineLR WarmupMultiStepLR WarmupParamScheduler build_lr_scheduler
    solver: build_optimizer get_default_optimizer_params
    solver.build: _expand_param_groups build_lr_scheduler build_optimizer get_default_optimizer_params
    solver.build: maybe_add_gradient_clipping reduce_param_groups
    solver.lr_scheduler: LRMultiplier LRScheduler WarmupCosineLR WarmupMultiStepLR WarmupParamScheduler
    solver.lr_scheduler: _get_warmup_factor_at_iter
    utils.analysis: FlopCountAnalysis parameter_count parameter_count_table
    utils.collect_env: collect_env_info
    utils.comm: all_gather create_local_process_group gather get_local_process_group get_local_rank
    utils.comm: get_local_size get_rank get_world_size is_main_process reduce_dict shared_random_seed synchronize
    utils.env: TORCH_VERSION seed_all_rng
    utils.events: CommonMetricPrinter EventStorage EventWriter HistoryBuffer JSONWriter TensorboardXWriter
    utils.events: _CURRENT_STORAGE_STACK get_event_storage has_event_storage
    utils.file_io: PathHandler PathManager
    utils.logger: create_small_table log_every_n log_every_n_seconds log_first_n setup_logger
    utils.memory: retry_if_cuda_oom
    utils.registry: Registry locate
"""


def names(table):
    for line in table.strip().splitlines():
        module, _, found = line.strip().partition(":")
        yield from ((f"detectron2.{module}", name) for name in found.split())


@pytest.mark.parametrize(("module", "name"), list(names(REFUSED)))
def test_names_of_detection_are_refused_with_a_reason(module, name):
    assert home_of(module, name) is None
    assert " is not in hookline: " in describe(f"{module}.{name}")


def test_the_names_of_the_engine_are_here():
    assert [f"{module}.{name}" for module, name in names(PRESENT) if home_of(module, name) is None] == []
    assert all(module == "detectron2" or module.rpartition(".")[0] in MODULES.split() for module in MODULES.split())
