"""The example mlp.yaml, as a LazyConfig for tools/lazyconfig_train_net.py."""

from fvcore.common.param_scheduler import CosineParamScheduler
from torch import nn
from torch.optim import AdamW

from hookline.config import LazyCall as L
from hookline.engine.data import InferenceSampler, TrainingSampler, build_batch_data_loader
from hookline.engine.data.datasets import synthetic
from hookline.engine.evaluation import Accuracy, MetricsEvaluator
from hookline.engine.modeling import MLP, ModelAdapter
from hookline.engine.solver import WarmupParamScheduler, get_default_optimizer_params

model = L(MLP)(in_features=8, num_classes=4, hidden=[32])
adapter = L(ModelAdapter)(loss=L(nn.CrossEntropyLoss)())

optimizer = L(AdamW)(
    params=L(get_default_optimizer_params)(weight_decay_norm=0.0),  # lazyconfig_train_net.py adds the model
    lr=0.003,
    weight_decay=0.01,
)
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0), warmup_length=0.1, warmup_factor=0.001
)

dataloader = {
    "train": L(build_batch_data_loader)(
        dataset=L(synthetic)(size=1024, seed=0),
        sampler=L(TrainingSampler)(size=1024, seed="${train.seed}"),
        total_batch_size=64,
    ),
    "test": L(build_batch_data_loader)(
        dataset=L(synthetic)(size=256, seed=1),
        sampler=L(InferenceSampler)(size=256),
        total_batch_size=64,
        drop_last=False,
    ),
    "evaluator": L(MetricsEvaluator)(dataset_name="synthetic", metrics=L(dict)(accuracy=L(Accuracy)())),
}

train = {
    "output_dir": "./output/synthetic_mlp_lazy",
    "init_checkpoint": "",
    "max_iter": 160,
    "amp": {"enabled": False},
    "ddp": {},
    "checkpointer": {"period": 80, "max_to_keep": 3},
    "eval_period": 16,
    "log_period": 20,
    "device": "cpu",
    "seed": 42,
}
