"""The JSON schema of config files, and what type checkers know of a config and a trainer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hookline.config import get_cfg
from hookline.config.yaml_files import load_text
from hookline.engine.setup.schema import schema_of_configs

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(json.dumps(schema_of_configs()))
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def problems(validator, text):
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(load_text(text, "a.yaml"))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_examples_fit_the_schema(validator, path):
    assert problems(validator, path.read_text()) == []


def test_the_config_of_a_run_fits_the_schema(validator):
    assert problems(validator, get_cfg().dump()) == []
    assert list(validator.iter_errors(json.loads(json.dumps(get_cfg().to_dict())))) == []


@pytest.mark.parametrize(
    "good",
    [
        '_BASE_: ["a.yaml", "b.yaml"]',
        "MODEL: {NAME: my_package.nets:Net, ARGS: {anything: [1, 2]}}",
        "MODEL: {ARGS: {num_classes: 2}}",
        "SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {betas: [0.9, 0.95]}}}",
        "SOLVER: {OPTIMIZER: AdamW, STEPS: '(3, 4)', MAX_ITER: 1.5ep, TIME_LIMIT: 0, WARMUP_ITERS: 1_000it}",
        "SOLVER: {OPTIMIZERS: {critic: {PARAMS: critic, BASE_LR: 0.1}}, WEIGHT_DECAY_NORM: None}",
        "SOLVER: {PARAM_GROUPS: [{REGEX: .*bias, WEIGHT_DECAY: 0}]}",
        "DATASETS: {TEST: [{NAME: digits_test, AS: digits, EVAL_PERIOD: 5ep}, digits_test]}",
        "HOOKS: [EMA, {NAME: EarlyStopping, ARGS: {metric: a, patience: 3}}, {NAME: 'my:Hook', ARGS: {x: 1}}]",
        "DATALOADER: {COLLATE_FN: {NAME: pad_collate, ARGS: {padding: 1}}, PIN_MEMORY: auto}",
    ],
)
def test_valid_keys_fit_the_schema(validator, good):
    assert problems(validator, good) == []


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ("SOLVRE: {}", "$"),
        ("SOLVER: {BASE_RL: 1}", "$.SOLVER"),
        ("SOLVER: {BASE_LR: fast}", "$.SOLVER.BASE_LR"),
        ("SOLVER: {BASE_LR: -1}", "$.SOLVER.BASE_LR"),
        ("SOLVER: {MAX_ITER: 3 weeks}", "$.SOLVER.MAX_ITER"),
        ("SOLVER: {WARMUP_ITERS: 2h}", "$.SOLVER.WARMUP_ITERS"),
        ("SOLVER: {TIME_LIMIT: 2ep}", "$.SOLVER.TIME_LIMIT"),
        ("SOLVER: {NONFINITE_LOSS: ignore}", "$.SOLVER.NONFINITE_LOSS"),
        ("SOLVER: {OPTIMIZERS: {a: {MAX_ITER: 3}}}", "$.SOLVER.OPTIMIZERS.a"),
        ("MODEL: {NAME: ConvNte}", "$.MODEL.NAME"),
        ("MODEL: {NAME: MLP, ARGS: {hiden: [3]}}", "$.MODEL.ARGS"),
        ("HOOKS: [{NAME: EMA, ARGS: {deacy: 0.9}}]", "$.HOOKS"),
        ("HOOKS: [{NAME: EMA, AS: ema}]", "$.HOOKS"),
        ("SEED: null", "$.SEED"),
    ],
)
def test_misspelt_keys_and_wrong_values_do_not(validator, bad, where):
    assert [problem.partition(":")[0] for problem in problems(validator, bad)] == [where]


TYPED = """
from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, HookBase

def add_my_config(cfg: CfgNode) -> None:
    cfg.MY = CfgNode()
    cfg.SOLVER.MY_KEY = 3

cfg = get_cfg()
add_my_config(cfg)
cfg.SOLVER.MAX_ITER = "20ep"
reveal_type(cfg.SOLVER.BASE_LR)
reveal_type(cfg.clone().SOLVER.AMP.ENABLED)
reveal_type(cfg.MY.KEY)
reveal_type(DefaultTrainer(cfg).cfg.OUTPUT_DIR)

class Hook(HookBase):
    def after_step(self) -> None:
        reveal_type(self.trainer.cfg.SOLVER.NESTEROV)
        reveal_type(self.trainer.iter)
"""


@pytest.mark.slow
def test_a_type_checker_accepts_keys_and_knows_the_trainer(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "links/hookline").mkdir(parents=True)
    for source in (*(ROOT / "src/hookline").iterdir(), *(ROOT / name for name in ("config", "hooks", "engine"))):
        (tmp_path / "links/hookline" / source.name).symlink_to(source)
    (tmp_path / "script.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "script.py"]
    environment = {"MYPYPATH": str(tmp_path / "links"), "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    types = [line.split('"')[1] for line in run.stdout.splitlines() if "Revealed type" in line]
    assert (types, run.returncode) == (["Any", "Any", "Any", "Any", "Any", "int"], 0), run.stdout + run.stderr
