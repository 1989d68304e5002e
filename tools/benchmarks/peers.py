"""A step of other trainers on the tiny model: each in its leanest set-up, and with its defaults."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from measure import Groups, Run
from step import GROUPS as OURS
from tasks import Parts, Span, by_hand, plain_parts, tiny_config
from torch import nn
from torch.utils.data import default_collate

LOSS = nn.CrossEntropyLoss()


def lightning(folder: str, parts: Parts, span: Span, bare: bool) -> None:
    """``barebones=True``; all defaults and a logged loss."""
    from lightning.pytorch import LightningModule, Trainer  # pyright: ignore[reportMissingImports]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts[0]

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = LOSS(self.model(batch[0]), batch[1])
            if not bare:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return parts[2]

    module = Module()
    module.on_train_batch_end = span.step
    options = {"accelerator": "cpu", "max_steps": span.total, "default_root_dir": folder, "barebones": bare}
    Trainer(**options).fit(module, parts[1])


def transformers(folder: str, parts: Parts, span: Span, bare: bool) -> None:
    """No reports, progress bar, saving, clipping or schedule; all defaults. SGD in both."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts[0]

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(x)
            return {"loss": LOSS(logits, labels), "logits": logits}

    options: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no"} if bare else {}
    if bare:
        options |= {"save_strategy": "no", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(folder, max_steps=span.total, per_device_train_batch_size=4, use_cpu=True, **options)
    clock = type("Clock", (TrainerCallback,), {"on_step_end": lambda self, *args, **kwargs: span.step()})()
    collate = lambda samples: dict(zip(("x", "labels"), default_collate(samples), strict=True))  # noqa: E731
    data = {"train_dataset": parts[1].dataset, "data_collator": collate}
    Trainer(Model(), arguments, **data, callbacks=[clock], optimizers=(parts[2], None)).train()


def _runs(folder: str, peer: Callable[[str, Parts, Span, bool], None]) -> dict[str, Run]:
    def run(steps: int, bare: bool) -> float:
        span = Span(steps)
        peer(folder, plain_parts(cfg), span, bare)
        return span.seconds

    cfg = tiny_config(folder)
    runs = {"lean": partial(run, bare=True), "default": partial(run, bare=False)}
    return {"by hand": by_hand(plain_parts(cfg)), **runs}


_PEERS = (lightning, transformers)
GROUPS: Groups = {"hookline": OURS["tiny"]}
GROUPS |= {peer.__name__: (2000, partial(_runs, peer=peer)) for peer in _PEERS if find_spec(peer.__name__)}
