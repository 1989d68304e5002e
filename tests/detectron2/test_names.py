"""The table of detectron2's names: every row leads to a name of hookline, and the page shows the table."""

import importlib
import runpy
from pathlib import Path

import pytest

from hookline.detectron2.finder import describe
from hookline.detectron2.names import HOMES, REFUSED, homes_of

DOCS = Path(__file__).parents[2] / "docs" / "porting"


# What about 170 files of public projects import.
IMPORTED = """
    checkpoint: DetectionCheckpointer PeriodicCheckpointer
    checkpoint.c2_model_loading: align_and_update_state_dicts
    checkpoint.detection_checkpoint: DetectionCheckpointer
    config: CfgNode LazyCall LazyConfig configurable get_cfg global_cfg instantiate set_global_cfg
    config.config: CfgNode get_cfg
    config.defaults: _C
    config.lazy: LazyCall
    data: DatasetCatalog DatasetFromList DatasetMapper MetadataCatalog build_batch_data_loader
    data: build_detection_test_loader build_detection_train_loader detection_utils transforms
    data.build: build_batch_data_loader build_detection_test_loader build_detection_train_loader
    data.build: filter_images_with_few_keypoints filter_images_with_only_crowd_annotations get_detection_dataset_dicts
    data.build: load_proposals_into_dataset print_instances_class_histogram trivial_batch_collator
    data.build: worker_init_reset_seed
    data.catalog: DatasetCatalog MetadataCatalog
    data.common: AspectRatioGroupedDataset DatasetFromList MapDataset ToIterableDataset
    data.dataset_mapper: DatasetMapper
    data.datasets: load_coco_json register_coco_instances register_coco_panoptic
    data.detection_utils: check_metadata_consistency read_image
    data.samplers: InferenceSampler RandomSubsetTrainingSampler RepeatFactorTrainingSampler TrainingSampler
    data.samplers.distributed_sampler: InferenceSampler TrainingSampler
    engine: AMPTrainer DEFAULT_TIMEOUT DefaultPredictor DefaultTrainer EvalHook HookBase SimpleTrainer TrainerBase
    engine: create_ddp_model default_argument_parser default_setup default_writers hooks launch
    engine.defaults: AMPTrainer DefaultPredictor create_ddp_model
    engine.hooks: BestCheckpointer EvalHook HookBase IterationTimer LRScheduler PeriodicCheckpointer PeriodicWriter
    engine.hooks: PreciseBN
    engine.launch: _distributed_worker _find_free_port launch
    engine.train_loop: AMPTrainer HookBase SimpleTrainer TrainerBase
    evaluation: COCOEvaluator DatasetEvaluator DatasetEvaluators SemSegEvaluator inference_context
    evaluation: inference_on_dataset print_csv_format verify_results
    evaluation.coco_evaluation: COCOEvaluator
    evaluation.evaluator: DatasetEvaluator DatasetEvaluators inference_on_dataset
    evaluation.testing: flatten_results_dict print_csv_format verify_results
    layers: Conv2d FrozenBatchNorm2d ShapeSpec cat get_norm
    model_zoo: get_config
    modeling: BACKBONE_REGISTRY META_ARCH_REGISTRY ROI_HEADS_REGISTRY build_model
    modeling.backbone: Backbone
    projects.deeplab: add_deeplab_config build_lr_scheduler
    solver: LRMultiplier LRScheduler WarmupParamScheduler build_lr_scheduler build_optimizer
    solver: get_default_optimizer_params
    solver.build: build_lr_scheduler build_optimizer get_default_optimizer_params maybe_add_gradient_clipping
    solver.build: reduce_param_groups
    solver.lr_scheduler: LRMultiplier WarmupCosineLR WarmupMultiStepLR WarmupParamScheduler _get_warmup_factor_at_iter
    structures: BitMasks BoxMode Boxes ImageList Instances pairwise_iou
    utils: comm
    utils.analysis: FlopCountAnalysis activation_count_operators flop_count_operators parameter_count_table
    utils.collect_env: collect_env_info
    utils.comm: all_gather get_world_size is_main_process reduce_dict synchronize
    utils.env: TORCH_VERSION fixup_module_metadata seed_all_rng
    utils.events: CommonMetricPrinter EventStorage EventWriter JSONWriter TensorboardXWriter get_event_storage
    utils.file_io: PathManager
    utils.logger: _log_api_usage create_small_table log_every_n_seconds log_first_n setup_logger
    utils.memory: retry_if_cuda_oom
    utils.registry: Registry
    utils.visualizer: ColorMode Visualizer
"""


@pytest.mark.parametrize("line", IMPORTED.strip().splitlines())
def test_what_projects_import_is_here_or_refused_with_a_reason(line):
    module, _, names = line.strip().partition(":")
    for name in names.split():
        full = f"detectron2.{module}.{name}"
        here = name in homes_of(f"detectron2.{module}") or full in HOMES
        assert here or " is not in hookline: " in describe(full), full


@pytest.mark.parametrize("module", HOMES)
def test_every_name_of_the_table_is_in_hookline(module):
    for home, name in homes_of(module).values():
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"


def test_every_module_of_the_table_has_its_parent():
    for module in HOMES:
        assert module == "detectron2" or module.rpartition(".")[0] in HOMES


def test_what_is_refused_is_not_in_the_table():
    for name in REFUSED:
        module, _, attribute = name.rpartition(".")
        assert attribute not in homes_of(module)


def test_the_page_shows_the_tables():
    page = (DOCS / "detectron2.md").read_text()
    assert runpy.run_path(str(DOCS / "names.py"))["with_tables"](page) == page, "run: python docs/porting/names.py"
