"""The tiny model with other trainers: each in its leanest setup, and with its defaults."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from .measure import Run, now
from .work import by_hand, default, lean, plain_parts, tiny_config

__all__ = ["PEERS", "installed", "runs_of"]

WARM_UP = 20


class Span:
    """Measures the time from the end of step ``WARM_UP`` to the end of the step ``steps`` later, called at each end."""

    def __init__(self, steps: int) -> None:
        self._done = 0
        self._last = WARM_UP + steps
        self.total = self._last + 1
        """Steps to run: one more, so that the work after the last measured step counts."""
        self.seconds = 0.0

    def step(self) -> None:
        self._done += 1
        if self._done == WARM_UP + 1:
            self._start = now()
        elif self._done == self._last + 1:
            self.seconds = now() - self._start


Parts = tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]


def _parts(folder: str) -> Parts:
    return plain_parts(tiny_config(folder), torch.optim.SGD)


@dataclass(frozen=True)
class Task:
    """What a peer trains.

    Attributes:
        parts: returns model, loader and optimizer; called with a folder.
        cpu: on the CPU; otherwise on a GPU, where the model already is.
        half: in mixed precision, bfloat16.
    """

    parts: Callable[[str], Parts] = _parts
    cpu: bool = True
    half: bool = False


TINY = Task()


def hookline(folder: str) -> dict[str, Run]:
    """SimpleTrainer without hooks; DefaultTrainer."""
    cfg = tiny_config(folder)
    return {"lean": lean(cfg), "default": default(cfg)}


def lightning(folder: str, task: Task = TINY) -> dict[str, Run]:
    """``barebones=True``; all defaults and a logged loss."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, logs: bool) -> None:
            super().__init__()
            self.model, self._optimizer, self._logs = model, optimizer, logs
            self.loss = nn.CrossEntropyLoss()

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            loss = self.loss(self.model(x), y)
            if self._logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return self._optimizer

    def run(steps: int, logs: bool, **options: Any) -> float:
        model, loader, optimizer = task.parts(folder)
        module, span = Module(model, optimizer, logs), Span(steps)
        if logs:

            class Clock(Callback):
                def on_train_batch_end(self, *args: Any) -> None:
                    span.step()

            options["callbacks"] = [Clock()]
        else:  # barebones takes no callbacks
            module.on_train_batch_end = lambda *args: span.step()
        if task.half:
            options["precision"] = "bf16-mixed"
        where: Any = {"accelerator": "cpu"} if task.cpu else {"accelerator": "gpu", "devices": 1}
        Trainer(max_steps=span.total, default_root_dir=folder, **where, **options).fit(module, loader)
        return span.seconds

    return {"lean": lambda steps: run(steps, False, barebones=True), "default": lambda steps: run(steps, True)}


def accelerate(folder: str, task: Task = TINY) -> dict[str, Run]:
    """Model, optimizer and loader prepared; with ``accumulate``, a prepared schedule and a TensorBoard tracker too."""
    from accelerate import Accelerator

    loss_function = nn.CrossEntropyLoss()

    def batches(loader: Any, span: Span) -> Iterator[tuple[int, Any]]:
        done = 0
        while True:
            for batch in loader:
                if done == span.total:
                    return
                yield done, batch
                done += 1
                span.step()

    def run_lean(steps: int) -> float:
        accelerator = Accelerator(cpu=task.cpu, mixed_precision="bf16" if task.half else None)
        model, loader, optimizer = task.parts(folder)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        span = Span(steps)
        for _, (x, y) in batches(loader, span):
            loss = loss_function(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        return span.seconds

    def run_default(steps: int) -> float:
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
        accelerator.init_trackers("run")
        model, loader, optimizer = _parts(folder)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        span = Span(steps)
        for step, (x, y) in batches(loader, span):
            with accelerator.accumulate(model):
                loss = loss_function(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if (step + 1) % 20 == 0:
                accelerator.log({"loss": loss.item()}, step=step)
        accelerator.end_training()
        return span.seconds

    return {"lean": run_lean, "default": run_default}


class _Named(Dataset[dict[str, torch.Tensor]]):
    """Samples as dicts with the argument names of a Hugging Face model."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = self._data[index]
        return {"x": x, "labels": y}

    def __len__(self) -> int:
        return len(self._data)


def transformers(folder: str) -> dict[str, Run]:
    """No reports, progress bar, saving, clipping or schedule; all defaults."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(x)
            return {"loss": self.loss(logits, labels), "logits": logits}

    def run(steps: int, **options: Any) -> float:
        model, loader, optimizer = _parts(folder)
        span = Span(steps)

        class Clock(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                span.step()

        arguments = TrainingArguments(
            folder, max_steps=span.total, per_device_train_batch_size=4, use_cpu=True, **options
        )
        data: Any = _Named(loader.dataset)  # type: ignore[arg-type]
        # SGD as in the other setups; the default is AdamW.
        Trainer(Model(model), arguments, train_dataset=data, callbacks=[Clock()], optimizers=(optimizer, None)).train()
        return span.seconds

    bare = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    return {"lean": lambda steps: run(steps, **bare), "default": run}


def mmengine(folder: str) -> dict[str, Run]:
    """A Runner by epochs: without its default hooks where possible; with them."""
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.optim import OptimWrapper
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor, y: torch.Tensor, mode: str = "tensor") -> Any:
            logits = self.model(x)
            return {"loss": self.loss(logits, y)} if mode == "loss" else logits

    count = 0

    def run(steps: int, **options: Any) -> float:
        nonlocal count
        count += 1
        model, loader, optimizer = _parts(folder)
        span = Span(steps)
        clock = type("Clock", (Hook,), {"after_train_iter": lambda self, *args, **kwargs: span.step()})()
        Runner(
            Model(model),
            folder,
            train_dataloader=loader,
            train_cfg={"by_epoch": True, "max_epochs": -(-span.total // len(loader))},
            optim_wrapper=OptimWrapper(optimizer),
            custom_hooks=[clock],
            experiment_name=f"run{count}",
            **options,
        ).train()
        return span.seconds

    none = dict.fromkeys(("timer", "logger", "param_scheduler", "checkpoint", "sampler_seed"))
    # By epochs: the loop by iterations sleeps two seconds at each restart of the loader.
    return {"lean": lambda steps: run(steps, default_hooks=none), "default": run}


def ignite(folder: str) -> dict[str, Run]:
    """An Engine around an update by hand; ``setup_common_training_handlers`` and TensorBoard."""
    from ignite.engine import Engine, Events, create_supervised_trainer

    try:
        from ignite.contrib.engines import common
    except ImportError:
        from ignite.engines import common

    loss_function = nn.CrossEntropyLoss()

    def finish(engine: Any, loader: Any, span: Span) -> float:
        def after(engine: Any) -> None:
            span.step()
            if engine.state.iteration == span.total:
                engine.terminate()

        engine.add_event_handler(Events.ITERATION_COMPLETED, after)
        engine.run(loader, max_epochs=-(-span.total // len(loader)))
        return span.seconds

    def run_lean(steps: int) -> float:
        model, loader, optimizer = _parts(folder)

        def update(engine: Any, batch: Any) -> torch.Tensor:
            x, y = batch
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return finish(Engine(update), loader, Span(steps))

    def run_default(steps: int) -> float:
        model, loader, optimizer = _parts(folder)
        trainer = create_supervised_trainer(
            model, optimizer, loss_function, output_transform=lambda x, y, y_pred, loss: {"loss": loss.item()}
        )
        common.setup_common_training_handlers(
            trainer,
            to_save={"trainer": trainer, "model": model, "optimizer": optimizer},
            save_every_iters=5000,
            output_path=folder,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
            output_names=["loss"],
            clear_cuda_cache=False,
        )
        board = common.setup_tb_logging(folder, trainer, optimizer)
        seconds = finish(trainer, loader, Span(steps))
        board.close()
        return seconds

    return {"lean": run_lean, "default": run_default}


def pytorch_accelerated(folder: str) -> dict[str, Run]:
    """Without callbacks; with the default ones."""
    from pytorch_accelerated import Trainer
    from pytorch_accelerated.callbacks import TrainerCallback
    from pytorch_accelerated.trainer import DEFAULT_CALLBACKS

    def run(steps: int, callbacks: Any) -> float:
        model, loader, optimizer = _parts(folder)
        span = Span(steps)

        class Clock(TrainerCallback):
            def on_train_step_end(self, *args: Any, **kwargs: Any) -> None:
                span.step()

        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(*callbacks, Clock()))
        trainer.train(
            loader.dataset,
            num_epochs=-(-span.total // len(loader)),
            per_device_batch_size=4,
            train_dataloader_kwargs={"num_workers": 0},
        )
        return span.seconds

    return {"lean": lambda steps: run(steps, ()), "default": lambda steps: run(steps, DEFAULT_CALLBACKS)}


# Name on the command line: module to import, distribution, and the function that runs it.
PEERS: dict[str, tuple[str, str, Callable[[str], dict[str, Run]]]] = {
    "hookline": ("hookline", "hookline", hookline),
    "lightning": ("lightning", "lightning", lightning),
    "accelerate": ("accelerate", "accelerate", accelerate),
    "transformers": ("transformers", "transformers", transformers),
    "mmengine": ("mmengine", "mmengine", mmengine),
    "ignite": ("ignite", "pytorch-ignite", ignite),
    "pytorch-accelerated": ("pytorch_accelerated", "pytorch-accelerated", pytorch_accelerated),
}


def installed(name: str) -> str:
    """The peer's version; empty if it is not installed."""
    module, distribution, _ = PEERS[name]
    if importlib.util.find_spec(module) is None:
        return ""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "?"


def runs_of(name: str, folder: str) -> dict[str, Run]:
    """The hand-written loop and the setups of the peer."""
    return {"by hand": by_hand(tiny_config(folder), torch.optim.SGD), **PEERS[name][2](folder)}
