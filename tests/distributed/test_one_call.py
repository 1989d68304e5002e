import pytest
import torch
from ranks import run_ranks


def test_ranks_share_the_data_and_all_have_all_predictions(tmp_path):
    exit_code, output, results = run_ranks("one_call:train", 2, tmp_path)
    assert exit_code == 0, output
    first, second = results
    assert first["targets"] == second["targets"] == first["expected"]
    assert first["outputs"] == second["outputs"]
    hits = torch.tensor(first["outputs"]).argmax(1) == torch.tensor(first["targets"])
    assert first["accuracy"] == first["predicted"] == pytest.approx(hits.double().mean().item())
    assert first["own_part"] + second["own_part"] == 7
    assert "a DataLoader gives each of 2 ranks all samples; pass the data set" in first["refusal"]
    assert (tmp_path / "run" / "log.txt.rank1").exists()
