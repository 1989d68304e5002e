"""``tools/analyze_model.py``."""

from run_tools import ROOT, run_tool

CONFIG = ROOT / "configs/synthetic/mlp.yaml"


def test_parameters_flops_and_activations_of_each_submodule(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ["MODEL.ARGS.hidden", "[4]", "DATALOADER.BATCH_SIZE", "2"]
    code, out, _ = run_tool(
        "analyze_model.py", ["--config-file", CONFIG, "--tasks", "flop", "parameter", "structure", "--", *own], capsys
    )
    assert code == 0
    assert "in_features=8, out_features=4" in out
    first = next(
        line for line in out.splitlines() if "#flops" not in line and "| model" in line and line.count("|") == 5
    )
    cells = [cell.strip() for cell in first.split("|")[2:-1]]
    weights = 8 * 4 + 4 * 4
    assert cells == [str(weights + 8), str(2 * weights), str(2 * 8)]
    assert f"{2 * weights} FLOPs for 2 samples" in out
    assert not list(tmp_path.iterdir())


def test_a_wrong_config_exits_with_2(capsys):
    code, _, err = run_tool("analyze_model.py", ["--config-file", CONFIG, "MODEL.NAME", "MPL"], capsys)
    assert code == 2
    assert "did you mean 'MLP'" in err
