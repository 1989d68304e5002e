"""The same training on any number of ranks. 37 samples in batches of 8: the last batch of an epoch has 5."""

import logging

import torch
from results import write_result
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hookline.engine import SimpleTrainer, hooks
from hookline.engine.data import ArrayDataset, EpochSampler, GlobalBatchSampler
from hookline.engine.modeling import ModelAdapter
from hookline.engine.parallel import STRATEGY_REGISTRY


def loader(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(37, 6, generator=generator), torch.randint(3, (37,), generator=generator)
    data = ArrayDataset(x, y)
    return DataLoader(
        data, batch_sampler=GlobalBatchSampler(EpochSampler(37, seed=1), batch_size), collate_fn=data.collate_fn
    )


class Tokens(nn.Module):
    """Returns a mean over items. Samples have different numbers of items."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, batch):
        x, y = batch
        losses = nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        mask = x[:, 0] > 0
        return {"loss": (losses * mask).sum() / mask.sum().clamp(min=1), "num_items": mask.sum()}


def run(model, adapter, accumulation_steps=1, strategy=None, count=None, clip=None, period=20):
    torch.manual_seed(7)
    model = model()
    strategy = STRATEGY_REGISTRY.build("ddp", strategy or {})
    model = strategy.wrap(model, torch.device("cpu"))
    if count is not None and isinstance(model, DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        def counting(state, bucket):
            count.append(1)
            return default_hooks.allreduce_hook(state, bucket)

        model.register_comm_hook(None, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = SimpleTrainer(
        model,
        loader(),
        optimizer,
        adapter=adapter,
        accumulation_steps=accumulation_steps,
        strategy=strategy,
        clip_gradients=clip,
    )
    trainer.register_hooks([hooks.PeriodicWriter([], period=period)])
    trainer.train(0, 12)
    histories = trainer.storage.histories()
    return {
        "losses": [value for value, _ in histories["total_loss"].values()],
        "weights": [p.flatten().tolist() for p in model.parameters()],
        "ranks": [name for name in histories if "rank" in name],
    }


def plain():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def clip(parameters):
    return nn.utils.clip_grad_norm_(parameters, 0.5)


def main(folder):
    logging.disable(logging.INFO)
    loss = ModelAdapter(nn.CrossEntropyLoss())
    exchanges = []
    results = {
        "plain": run(plain, loss),
        "clipped": run(plain, loss, clip=clip),
        "accumulated": run(plain, loss, accumulation_steps=2, count=exchanges),
        "items": run(Tokens, ModelAdapter()),
        "items accumulated": run(Tokens, ModelAdapter(), accumulation_steps=2),
        "static": run(plain, loss, strategy={"static_graph": True}),
        "static accumulated": run(plain, loss, strategy={"static_graph": True}, accumulation_steps=3),
        "bf16": run(plain, loss, strategy={"compression": "bf16"}),
    }
    results["exchanges"] = len(exchanges)
    write_result(folder, results)
