"""Names of other trainers, and the keys (or options) that mean the same here, for error messages."""

_NAMES = {
    "--num-gpus": "devices gpus n_gpu n_gpus nproc_per_node num_devices num_processes",
    "--resume": "resume_from resume_from_checkpoint",
    "CHECKPOINT.BEST.METRIC": "checkpoint.metric metric_for_best_model",
    "CHECKPOINT.MAX_TO_KEEP": "save_total_limit save_top_k",
    "DATALOADER.BATCH_SIZE": "batch batch_size bs per_device_train_batch_size per_gpu_batch_size train_batch_size",
    "DATALOADER.COLLATE_FN": "collate collate_fn data_collator",
    "DATALOADER.NUM_WORKERS": "dataloader_num_workers num_workers workers",
    "DATASETS.TEST": """eval_data eval_dataset eval_loader test_data test_dataset test_loader val_data val_dataloader
        val_dataloaders val_dataset val_loader valid_data valid_dataset valid_loader validation_data""",
    "DATASETS.TRAIN": """data data_loader dataloader dataset train_data train_dataloader train_dataloaders train_dataset
        train_loader training_data trainset""",
    "HOOKS": "callback callbacks early_stopping hooks",
    "LOG.PERIOD": "log_every log_every_n_steps log_interval logging_steps print_freq",
    "LOG.WRITERS": "logger loggers report_to writers",
    "MODEL.DEVICE": "accelerator device",
    "MODEL.WEIGHTS": "ckpt_path init_checkpoint init_from pretrained",
    "MODEL.LOSS.NAME": "criterion loss loss_fn loss_func loss_function",
    "OUTPUT_DIR": "default_root_dir log_dir logging_dir out out_dir output save_dir work_dir",
    "PARALLEL.NAME": "strategy",
    "SEED": "manual_seed random_seed random_state seed",
    "SOLVER.ACCUMULATION_STEPS": "accum_iter accumulate_grad_batches grad_accum gradient_accumulation_steps",
    "SOLVER.AMP.ENABLED": "amp bf16 fp16 mixed_precision precision use_amp",
    "SOLVER.BASE_LR": "base_lr learning_rate lr lr0",
    "SOLVER.CHECKPOINT_PERIOD": """checkpoint.period checkpoint_interval checkpoint_period save_every save_freq
        save_interval save_period save_steps""",
    "SOLVER.CLIP_GRADIENTS": "clip_grad clip_grad_norm grad_clip gradient_clip_val max_grad_norm",
    "SOLVER.LR_SCHEDULER_NAME": "lr_sched lr_scheduler lr_scheduler_type sched scheduler",
    "SOLVER.MAX_ITER": """epoch epochs fast_dev_run iterations iters max_epoch max_epochs max_iter max_iters max_steps
        n_epochs num_epochs num_iters num_steps num_train_epochs steps total_epochs total_steps train_epochs""",
    "SOLVER.OPTIMIZER.NAME": "optim optimizer optimizers",
    "SOLVER.WARMUP_ITERS": "warmup warmup_epochs warmup_iters warmup_steps",
    "SOLVER.WEIGHT_DECAY": "wd weight_decay",
    "TEST.EVAL_PERIOD": """check_val_every_n_epoch eval_every eval_interval eval_period eval_steps val_check_interval
        val_interval""",
    "TEST.METRICS": "compute_metrics metrics test.metric",
}
_KEYS = {name: key for key, names in _NAMES.items() for name in names.split()}


def key_for(name: str) -> str:
    """Return the key or option that means what another trainer calls ``name``, as "epochs" or "--lr"; "" if none does.

    Args:
        name: an argument, an option, or a full key of a config.
    """
    words = name.lower().lstrip("-").partition("=")[0].replace("-", "_")
    return _KEYS.get(words) or _KEYS.get(words.rpartition(".")[2], "")


def hint_of_epochs(name: str) -> str:
    """Return how a length is written in epochs if ``name`` is of one; else nothing."""
    return ', such as "3ep" for 3 epochs' if "epoch" in name.lower() else ""
