"""``hookline config``: explain, diff, check, list."""

import re

import pytest
from loggers import unchanged_logging

from hookline.cli import main
from hookline.config import get_cfg


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Run ``hookline config`` in an empty folder; return exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        capsys.readouterr()
        try:
            with unchanged_logging():
                code = main(["config", *map(str, words)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_explain(command):
    assert command("explain", "SEED")[1].startswith("SEED\n  Seed of python, numpy, torch and the data order.")
    assert "MODEL ...\n" in command("explain")[1]
    code, _, err = command("explain", "SEDE")
    assert (code, err) == (
        2,
        "error: there is no config key 'SEDE'; did you mean 'SEED'? All keys: hookline config explain\n",
    )


def test_diff_of_files_and_runs(command, tmp_path):
    (tmp_path / "a.yaml").write_text("SEED: 1\nHOOKS: [EMA]\n")
    (tmp_path / "run").mkdir()
    cfg = get_cfg()
    cfg.SEED, cfg.MY_OWN = 2, "x"
    (tmp_path / "run/config.yaml").write_text(cfg.dump())
    assert command("diff", "a.yaml", "run") == (0, "SEED: 1 → 2\nHOOKS: ['EMA'] → []\nMY_OWN: (not set) → \"x\"\n", "")
    assert command("diff", "a.yaml", "a.yaml")[1] == "The configs are equal.\n"
    assert command("diff", "a.yaml", "b.yaml")[2].startswith("error: b.yaml: cannot read this config file")


def test_check_refuses_what_a_run_refuses_and_writes_nothing(command, tmp_path):
    assert command("check", "synthetic/mlp.yaml") == (0, "synthetic/mlp.yaml: valid\n", "")
    code, _, err = command("check", "synthetic/mlp.yaml", "MODEL.NAME", "MPL")
    assert code == 2
    assert "did you mean 'MLP'" in err
    assert command("check", "synthetic/mlp.yaml", "DATASETS.TRAIN", "[]")[2].startswith("error: DATASETS.TRAIN: ")
    assert list(tmp_path.iterdir()) == []


def test_list(command):
    assert re.search(r"^MODEL +\d+  MODEL.NAME$", command("list")[1], re.MULTILINE)
    assert "Accuracy: " in command("list", "metrics")[1]
    assert command("list", "metrisc")[2].startswith("error: there is no registry 'metrisc'; did you mean 'METRIC'?")
