import random

import numpy as np
import pytest
import torch
from starts import arguments, set_up

from hookline.engine import (
    DefaultTrainer,
    seed_all_rng,
)


def test_equal_seeds_give_equal_random_numbers(make):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    set_up(make("SEED", "5"), arguments())
    first = draw()
    seed_all_rng(5)
    assert draw() == first
    seed_all_rng(6)
    assert draw() != first


def test_a_negative_seed_is_replaced_and_saved(make, tmp_path):
    seeds = set()
    for _ in range(2):
        cfg = make()
        cfg.freeze()
        set_up(cfg, arguments())
        assert cfg.SEED >= 0
        assert cfg.is_frozen()
        assert f"SEED: {cfg.SEED}\n" in (tmp_path / "run" / "config.yaml").read_text()
        seeds.add(cfg.SEED)
    assert len(seeds) == 2


def test_a_resumed_run_reuses_its_random_seed(make):
    first, second = make(), make()
    set_up(first, arguments())
    set_up(second, arguments(resume=True))
    assert second.SEED == first.SEED


def test_an_explicit_seed_overrides_the_saved_one(make):
    set_up(make(), arguments())
    cfg = make("SEED", "7")
    set_up(cfg, arguments(resume=True))
    assert cfg.SEED == 7


@pytest.mark.parametrize("lost", ["config.yaml", "last_checkpoint"])
def test_a_random_seed_is_read_from_the_last_checkpoint_if_the_config_is_lost(make, tmp_path, lost):
    first, second = make("SOLVER.MAX_ITER", 2, "DATALOADER.BATCH_SIZE", 8, "SOLVER.CHECKPOINT_PERIOD", 1), make()
    set_up(first, arguments())
    DefaultTrainer(first).train()
    for name in {"config.yaml", lost}:
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "model_0000000.pth").write_bytes(b"damaged")
    set_up(second, arguments(resume=True))
    assert second.SEED == first.SEED


@pytest.mark.parametrize(("value", "warns"), [(True, False), ("warn", True)])
def test_deterministic_operations_are_asked_for(make, value, warns):
    try:
        set_up(make("DETERMINISTIC", value), arguments())
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns
    finally:
        torch.use_deterministic_algorithms(False)
