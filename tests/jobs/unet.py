"""Segment with a U-Net and a loss of two terms, each of them on the console and in the results."""

from given import UNet, scans
from torch.nn import functional as F

from hookline import Trainer


def loss(scores, mask):
    found = scores.softmax(1)[:, 1]
    dice = 1 - 2 * (found * mask).sum() / (found.sum() + mask.sum())
    return {"ce": F.cross_entropy(scores, mask), "dice": dice}


trainer = Trainer(
    UNet, scans(64), scans(16), loss=loss, optimizer="AdamW", lr=0.01, length="8ep", batch_size=16,
    eval_period="1ep", monitor="test/dice", monitor_mode="min", seed=1, output_dir="output/unet",
)  # fmt: skip
trainer.train()
