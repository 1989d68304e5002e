"""Seeds: given, drawn, saved and used again by a resume."""

import pytest
import torch
from starts import arguments, set_up

from hookline.engine import DefaultTrainer


def test_a_negative_seed_is_drawn_and_saved_and_a_resume_uses_it_unless_one_is_given(make, tmp_path):
    def seed(*overrides, **how):
        cfg = make(*overrides)
        cfg.freeze()
        set_up(cfg, arguments(**how))
        assert f"SEED: {cfg.SEED}\n" in (tmp_path / "run" / "config.yaml").read_text()
        return cfg.SEED

    seeds = [seed(), seed()]
    assert seeds[0] != seeds[1]
    assert min(seeds) >= 0
    assert seed(resume=True) == seeds[1]
    assert seed("SEED", "7", resume=True) == 7


@pytest.mark.parametrize("lost", ["config.yaml", "last_checkpoint"])
def test_a_drawn_seed_is_read_from_the_last_checkpoint_if_the_config_is_lost(quick, make, tmp_path, lost):
    first, second = quick("SEED", -1, "SOLVER.CHECKPOINT_PERIOD", 1), make()
    set_up(first, arguments())
    DefaultTrainer(first).train()
    for name in {"config.yaml", lost}:
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "model_0000000.pth").write_bytes(b"corrupt")
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
