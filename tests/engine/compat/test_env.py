import random

import numpy as np
import torch

from hookline.config import get_cfg
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.compat.collect_env import collect_env_info
from hookline.engine.compat.env import TORCH_VERSION, seed_all_rng
from hookline.engine.compat.file_io import PathHandler, PathManager


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_a_seed_gives_the_same_numbers_and_no_seed_others():
    seed_all_rng(3)
    first = draw()
    seed_all_rng(3)
    assert draw() == first
    seed_all_rng()
    others = draw()
    assert all(a != b for a, b in zip(first, others, strict=True))


def test_torchs_version_is_compared_as_numbers():
    assert TORCH_VERSION >= (2, 6)


def test_the_environment_is_described():
    text = collect_env_info()
    assert all(word in text for word in ("hookline", "torch", torch.__version__, "GPU available"))


def test_handlers_of_the_path_manager_open_configs_and_weights(tmp_path):
    class Handler(PathHandler):
        def _get_supported_prefixes(self):
            return ["mine://"]

        def _get_local_path(self, path, **kwargs):
            return str(tmp_path / path.removeprefix("mine://"))

        def _open(self, path, mode="r", **kwargs):
            return open(self._get_local_path(path), mode, **kwargs)

        def _isfile(self, path, **kwargs):
            return True

    PathManager.register_handler(Handler(), allow_override=True)
    (tmp_path / "config.yaml").write_text("SEED: 7")
    cfg = get_cfg()
    cfg.merge_from_file("mine://config.yaml")
    assert cfg.SEED == 7
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.save({"model": other.state_dict()}, tmp_path / "weights.pth")
    Checkpointer(model).load("mine://weights.pth")
    assert torch.equal(model.weight, other.weight)
