"""Batches of the loader of a config, over those of a plain DataLoader."""

from collections.abc import Callable

import torch
from measure import Groups, Run, repeated
from tasks import forever, tiny_config
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hookline.engine.data import build_train_loader
from hookline.engine.data.epoch_iterator import EpochIterator

SIZE, SHAPE, BATCH_SIZE = 4096, (1, 8, 8), 64


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Returns single samples, as a data set of files does, with a random flip and noise."""

    def __init__(self) -> None:
        self._x, self._y = torch.randn(SIZE, *SHAPE), torch.zeros(SIZE, dtype=torch.int64)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        return (x.flip(-1) if torch.rand(()) < 0.5 else x) + 0.1 * torch.randn(SHAPE), self._y[index]

    def __len__(self) -> int:
        return SIZE


def _runs(name: str, arguments: dict[str, object], workers: int) -> Callable[[str], dict[str, Run]]:
    def build(folder: str) -> dict[str, Run]:
        cfg = tiny_config(folder)
        cfg.DATASETS.TRAIN = ({"NAME": name, "ARGS": arguments},)
        cfg.DATALOADER.BATCH_SIZE, cfg.DATALOADER.NUM_WORKERS = BATCH_SIZE, workers
        ours = build_train_loader(cfg)
        data = TensorDataset(*ours.dataset.tensors) if name == "synthetic" else ours.dataset
        plain = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        batches, plain_batches = EpochIterator(ours), forever(plain)
        return {"plain": repeated(lambda: next(plain_batches)), "hookline": repeated(lambda: next(batches))}

    return build


_KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "arrays": ("synthetic", {"size": SIZE, "shape": list(SHAPE)}),
    "samples": (f"{__name__}:Samples", {}),
}
GROUPS: Groups = {
    f"{kind}, {workers} workers": (640 if workers == 0 else 320, _runs(*entry, workers))
    for kind, entry in _KINDS.items()
    for workers in (0, 2)
}
