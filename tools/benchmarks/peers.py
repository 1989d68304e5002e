"""A step of other trainers on the tiny model: each in its leanest set-up, and with its defaults."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from measure import Groups, Run, now
from step import GROUPS as OURS
from tasks import WARM_UP, Parts, by_hand, forever, plain_parts, tiny_config
from torch import nn
from torch.utils.data import default_collate

LOSS = nn.CrossEntropyLoss()


class Span:
    """Measures the time from the end of step ``WARM_UP`` to the end of the step ``steps`` later."""

    def __init__(self, steps: int) -> None:
        self._done, self._last = 0, WARM_UP + steps
        self.total = self._last + 1  # one more, so that the work after the last measured step counts
        self.seconds = 0.0

    def step(self, *args: Any, **kwargs: Any) -> None:
        """To be called at the end of each step."""
        self._done += 1
        if self._done == WARM_UP + 1:
            self._start = now()
        elif self._done == self._last + 1:
            self.seconds = now() - self._start


def lightning(folder: str, parts: Parts, span: Span, bare: bool) -> None:
    """``barebones=True``; all defaults and a logged loss."""
    from lightning.pytorch import LightningModule, Trainer

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


def accelerate(folder: str, parts: Parts, span: Span, bare: bool) -> None:
    """Prepared parts; with ``accumulate``, a prepared schedule and a TensorBoard tracker, too."""
    from accelerate import Accelerator

    options = {} if bare else {"log_with": "tensorboard", "project_dir": folder}
    accelerator = Accelerator(cpu=True, **options)
    accelerator.init_trackers("run")
    model, loader, optimizer = accelerator.prepare(*parts)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(parts[2], lambda step: 1.0))

    def update(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = LOSS(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        return loss

    for step, (x, y) in zip(range(span.total), forever(loader), strict=False):
        if bare:
            update(x, y)
        else:
            with accelerator.accumulate(model):
                loss = update(x, y)
                schedule.step()
            if (step + 1) % 20 == 0:
                accelerator.log({"loss": loss.item()}, step=step)
        span.step()
    accelerator.end_training()


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


def mmengine(folder: str, parts: Parts, span: Span, bare: bool) -> None:
    """A Runner by epochs, since by iterations it sleeps at each restart of the loader; without hooks, or with them."""
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = parts[0]

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
            logits = self.model(x)
            return {"loss": LOSS(logits, y)} if mode == "loss" else logits

    none = dict.fromkeys(("timer", "logger", "param_scheduler", "checkpoint", "sampler_seed"))
    Runner(
        Model(),
        folder,
        train_dataloader=parts[1],
        train_cfg={"by_epoch": True, "max_epochs": -(-span.total // len(parts[1]))},
        optim_wrapper=OptimWrapper(parts[2]),
        custom_hooks=[type("Clock", (Hook,), {"after_train_iter": lambda self, *args, **kwargs: span.step()})()],
        experiment_name=f"run{id(span)}",
        **({"default_hooks": none} if bare else {}),
    ).train()


def ignite(folder: str, parts: Parts, span: Span, bare: bool) -> None:
    """An Engine around an update by hand; ``setup_common_training_handlers`` and TensorBoard."""
    from ignite.contrib.engines import common
    from ignite.engine import Events, create_supervised_trainer

    model, loader, optimizer = parts
    output = (lambda x, y, y_pred, loss: loss) if bare else (lambda x, y, y_pred, loss: {"loss": loss.item()})
    trainer = create_supervised_trainer(model, optimizer, LOSS, output_transform=output)
    if not bare:
        state = {"trainer": trainer, "model": model, "optimizer": optimizer}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        common.setup_common_training_handlers(
            trainer, state, save_every_iters=5000, output_path=folder, lr_scheduler=schedule, output_names=["loss"]
        )
        common.setup_tb_logging(folder, trainer, optimizer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, span.step)
    trainer.run(loader, max_epochs=-(-span.total // len(loader)))


def _runs(folder: str, peer: Callable[[str, Parts, Span, bool], None]) -> dict[str, Run]:
    def run(steps: int, bare: bool) -> float:
        span = Span(steps)
        peer(folder, plain_parts(cfg), span, bare)
        return span.seconds

    cfg = tiny_config(folder)
    runs = {"lean": partial(run, bare=True), "default": partial(run, bare=False)}
    return {"by hand": by_hand(plain_parts(cfg)), **runs}


_PEERS = (lightning, accelerate, transformers, mmengine, ignite)
GROUPS: Groups = {"hookline": OURS["tiny"]}
GROUPS |= {peer.__name__: (2000, partial(_runs, peer=peer)) for peer in _PEERS if find_spec(peer.__name__)}
