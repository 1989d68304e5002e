"""Arguments and methods of other libraries' trainers, with those of :class:`~hookline.engine.Trainer`."""

from collections.abc import Collection

from ...config import suggest
from ...config.errors import MismatchError

__all__ = ["method_here", "refuse_arguments"]

# What to write here, and the names of transformers, Lightning, Keras, Accelerate, pytorch-accelerated and fastNLP.
_ARGUMENTS = {
    'length="10ep"': "epochs num_epochs max_epochs n_epochs num_train_epochs max_steps num_steps max_iter train_steps",
    "train_data": "train_dataset train_dataloader train_dataloaders train_loader dataset data x",
    "test_data": "eval_dataset val_dataset valid_dataset validation_data val_dataloader val_dataloaders eval_loader "
    "evaluate_dataloaders val_data test_dataset val_loader",
    "hooks": "callbacks callback plugins",
    "loss": "loss_fn loss_func criterion compute_loss_func loss_function",
    "metrics": "compute_metrics metric",
    "optimizer": "optimizers optim optimizer_cls optimizer_cls_and_kwargs",
    "lr": "learning_rate base_lr",
    "lr_scheduler": "scheduler schedulers lr_schedulers lr_scheduler_type",
    "batch_size": "per_device_train_batch_size train_batch_size bs",
    "eval_period": "eval_steps eval_strategy evaluation_strategy evaluate_every val_check_interval eval_every "
    "check_val_every_n_epoch",
    "output_dir": "default_root_dir save_dir work_dir save_folder log_dir logging_dir",
    'config={"SOLVER.CHECKPOINT_PERIOD": "1ep"}': "save_steps save_strategy save_interval",
    'config={"SOLVER.ACCUMULATION_STEPS": 4}': "gradient_accumulation_steps accumulate_grad_batches accumulation_steps",
    'config={"SOLVER.AMP.ENABLED": True}': "precision fp16 bf16 mixed_precision",
    'config={"SOLVER.CLIP_GRADIENTS.ENABLED": True, "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": "norm"}': "gradient_clip_val "
    "max_grad_norm clip_grad_norm",
    'config={"SOLVER.WARMUP_ITERS": 100, "SOLVER.RESCALE_INTERVAL": True}': "warmup_steps warmup_ratio warmup_epochs",
    'config={"SOLVER.WEIGHT_DECAY": 0.01}': "weight_decay",
    'config={"MODEL.DEVICE": "cuda"}': "device accelerator",
    'config={"DATALOADER.NUM_WORKERS": 4}': "num_workers dataloader_num_workers",
    'config={"DATALOADER.COLLATE_FN.NAME": "module:function"}': "collate_fn data_collator",
    'config={"FAST_DEV_RUN": 1}': "fast_dev_run",
    'config={"LOG.WRITERS": [...]}': "logger loggers report_to",
    "launch() of hookline.engine, for several processes": "devices num_gpus strategy num_nodes n_gpus",
    "config={...}, with the keys of config/defaults.py": "args training_args",
}
_METHODS = {
    "train": "fit run start train_model",
    "evaluate": "validate test_model val eval_model",
    "predict": "predict_proba predict_classes",
    "register_hooks": "add_callback add_hook add_callbacks add_event",
    "remove_hook": "remove_callback pop_callback",
    "resume_or_load": "load_checkpoint resume load",
    "checkpointer.save": "save_model save_checkpoint save",
    "request_stop": "stop stop_training should_stop",
    "iter": "global_step current_step",
    "epoch": "current_epoch",
    "storage.put_scalar": "log log_metric log_metrics log_dict",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: here for here, names in table.items() for name in names.split()}


_ARGUMENT, _METHOD = _by_name(_ARGUMENTS), _by_name(_METHODS)


def refuse_arguments(names: Collection[str], known: Collection[str]) -> None:
    """Raise an error for unknown arguments of ``Trainer``, which says what to write here.

    Args:
        names: the unknown names; nothing is raised if there are none.
        known: the arguments.

    Raises:
        MismatchError: there is one. It is also a TypeError.
    """
    problems = []
    for name in names:
        here = _ARGUMENT.get(name)
        hint = f"; here it is {here}" if here else suggest(name, known) or f". It takes: {', '.join(known)}"
        problems.append(f"Trainer() takes no argument '{name}'{hint}")
    if problems:
        raise MismatchError("\n".join(problems))


def method_here(name: str) -> str:
    """Return what a method or attribute of another library's trainer is here; empty if it is not known."""
    return _METHOD.get(name, "")
