"""Fine-tune a model of timm on a folder of images, with mixup and cutmix, and write its predictions."""

import timm
import torch
from given import photos
from torch import nn
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from hookline import Trainer

photos("photos")
pixels = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
train = ImageFolder("photos/train", v2.Compose([v2.RandomResizedCrop(32, (0.5, 1.0)), *pixels]))
val = ImageFolder("photos/val", v2.Compose([v2.Resize(32), *pixels]))
mixed = v2.RandomChoice([v2.MixUp(num_classes=2), v2.CutMix(num_classes=2)])


def mix(samples):
    return mixed(*default_collate(samples))


trainer = Trainer(
    timm.create_model("resnet10t", num_classes=2), train, val, loss=nn.CrossEntropyLoss(), metrics=["Accuracy"],
    optimizer="AdamW", lr=1e-3, lr_scheduler="WarmupCosineLR", warmup="1ep", length="3ep", batch_size=16, ema=0.9,
    config={"DATALOADER.TRAIN_COLLATE_FN": mix, "TEST.PREDICTIONS_COLUMNS": ["file", "class_name", "probability"]},
    seed=1, output_dir="output/folder",
)  # fmt: skip
trainer.train()
trainer.predict(output="predictions.jsonl")
