"""Wrong configs: ``hookline train`` refuses each with exit code 2 and one message, and nothing changes on disk.

The tables of the files test_wrong_*.py are the only places that assert the texts of messages.
"""

from pathlib import Path

import pytest
from refusing import assert_refused
from run_tools import run_command

# Each: a line of a config file, and what the message says. Files are named: sub/case.yaml.
KEYS = [
    ("SOLVRE: {BASE_LR: 1}", "case.yaml: unknown key 'SOLVRE.BASE_LR'; did you mean 'SOLVER.BASE_LR'?"),
    ("SOLVER: {BASE_RL: 1}", "unknown key 'SOLVER.BASE_RL'; did you mean 'SOLVER.BASE_LR'?"),
    ("SOLVER: {LR: 1}", "did you mean 'SOLVER.BASE_LR'?"),
    ("TRAINER: {MAX_EPOCHS: 3}", "unknown key 'TRAINER.MAX_EPOCHS'"),
    ("EVAL_PERIOD: 1ep", "did you mean 'TEST.EVAL_PERIOD'?"),
    ("SOLVER.BASE_LR: 1", "write it nested"),
    ("SOLVER: {OPTIMIZER.ARGS: {betas: [0.8, 0.9]}}", "unknown key 'SOLVER.OPTIMIZER.ARGS'; write it nested"),
    ("SOLVER: {CLIP_GRADIENTS: 2.5}", "expected a mapping of keys, got 2.5 (float); set SOLVER.CLIP_GRADIENTS.ENABLED"),
    ("SOLVER: {IMS_PER_BATCH: 16}", "SOLVER.IMS_PER_BATCH was renamed to DATALOADER.BATCH_SIZE"),
    ("VERSION: 2", "VERSION: this hookline reads version 1, not 2 (detectron2's number: leave it out)"),
    ("SOLVER: 3", "SOLVER: expected a mapping of keys, got 3 (int)"),
    ("SOLVER: {MAX_ITER: 2h}", "'2h' is a time; write an int (iterations), '500it' or '2ep'. SOLVER.TIME_LIMIT stops"),
    ("SOLVER: {MAX_ITER: 3 weeks}", "'3 weeks' is not a duration; write an int (iterations), '500it' or '2ep'"),
    ("SOLVER: {MAX_ITER: -1ep}", "SOLVER.MAX_ITER: '-1ep' is not a duration; write an int (iterations)"),
    ("SOLVER: {TIME_LIMIT: 2ep}", "SOLVER.TIME_LIMIT: '2ep' is not a time; write '45s', '30min' or '2h'"),
    ("SEED: !!python/name:os.system x", "could not determine a constructor for the tag"),
    ("MODEL:\n\tNAME: MLP", "found character '\\t' that cannot start any token"),
    ("SEED: 1\nSEED: 2", "the key 'SEED' appears twice"),
    (f"SEED: {10**30}", "SEED: must be at most "),
    ("SOLVER: {BASE_LR: nan}", "SOLVER.BASE_LR: expected float, got 'nan'"),
    ("SOLVER: {BASE_LR: .inf}", "SOLVER.BASE_LR: must be a finite number, not inf"),
    ("DETERMINISTIC: True\nCUDNN_BENCHMARK: True", "DETERMINISTIC and CUDNN_BENCHMARK: contradict each other"),
    ("LOG: {GATHER_METRIC_PERIOD: 0}", "LOG.GATHER_METRIC_PERIOD: must be at least 1"),
]
MODEL = [
    ("MODEL: {NAME: MPL}", "MODEL.NAME: unknown model 'MPL'; did you mean 'MLP'? Known: "),
    ("MODEL: {NAME: 'wrong_parts:Liner'}", "there is no 'Liner' in 'wrong_parts'; did you mean 'Linear'?"),
    ("MODEL: {NAME: 'wrong_prats:Linear'}", "there is no module 'wrong_prats'"),
    ("MODEL: {NAME: 'beside:Net'}\nOUTPUT_DIR: x", "start in "),
    ("MODEL: {NAME: 'wrong_import:Net'}", "importing 'wrong_import' fails: ModuleNotFoundError: No module named"),
    ("MODEL: {NAME: 'os:system'}", "'os:system' is in Python's standard library, which has no components"),
    ("MODEL: {NAME: 'wrong_parts:NotAModel'}", "MODEL.NAME: 'wrong_parts:NotAModel' cannot be the model: it is not a"),
    ("MODEL: {NAME: 'wrong_parts:a_string'}", "MODEL.NAME: 'wrong_parts:a_string' cannot be the model: it returned an"),
    ("MODEL: {NAME: 'wrong_parts:number'}", "it is of type int, not a class or a function"),
    ("MODEL: {ARGS: {hiden: [3]}}", "MODEL.ARGS.hiden: MLP takes no argument 'hiden'; did you mean 'hidden'?"),
    ("MODEL: {ARGS: {num_classes: four}}", "MODEL (MLP): TypeError: '<' not supported between"),
    ("MODEL: {NAME: 'wrong_parts:NeedsArgument'}", "MODEL.ARGS.width: NeedsArgument needs the argument 'width'"),
    ("MODEL: {NAME: 'wrong_parts:FailsToBuild'}", "ValueError: width must be even, not 7 (wrong_parts.py:"),
    ("MODEL: {NAME: 'wrong_parts:Frozen'}", "MODEL.NAME: Frozen has no parameter that requires a gradient"),
    ("MODEL: {NAME: 'wrong_parts:NoForward'}", 'Module [NoForward] is missing the required "forward" function'),
    ("MODEL: {NAME: 'wrong_parts:Multi'}", "Select one with MODEL.OUTPUT_MAPPING, such as {scores: input}"),
    (
        "MODEL: {NAME: 'wrong_parts:Multi', LOSS: {NAME: 'wrong_parts:loss_of_dict'}}",
        "the metric synthetic/accuracy takes one tensor, the model returned: scores, features. Select one with MODEL.",
    ),
    ("MODEL: {OUTPUT_MAPPING: {logits: input}}", "MODEL.OUTPUT_MAPPING needs outputs with names; the model returned a"),
    ("MODEL: {INPUT_MAPPING: {pixels: x}}", "MODEL.INPUT_MAPPING: MLP takes no 'x'. It takes: input"),
    ("MODEL: {NAME: 'wrong_parts:ReturnsNothing'}", "the model returned None: its forward() has no return statement"),
    ("SOLVER: {COMPILE_STEP: True}", "SOLVER.COMPILE_STEP was renamed to MODEL.COMPILE.ENABLED"),
    ("SOLVER: {CUDA_GRAPH: True}", "SOLVER.CUDA_GRAPH was renamed to MODEL.COMPILE.ENABLED: set it to True, and MODEL"),
    ("MODEL: {LOSS: {NAME: CrossEntropy}}", "MODEL.LOSS.NAME: unknown loss 'CrossEntropy'; did you mean 'CrossEntrop"),
    ("MODEL: {LOSS: {ARGS: {smoothing: 0.1}}}", "takes no argument 'smoothing'; did you mean 'label_smoothing'?"),
    ("MODEL: {LOSS: CrossEntropyLoss}", "MODEL.LOSS: expected a mapping of keys, got 'CrossEntropyLoss' (str); set"),
    ("MODEL: {ACTIVATION_CHECKPOINTING: ['blocks.*']}", "MLP has no submodule and no class that matches 'blocks.*'"),
    ("MODEL: {ACTIVATION_CHECKPOINTING_KEEP: [matmull]}", "no operations 'matmull'; did you mean 'matmul'?"),
    ("MODEL: {ACTIVATION_CHECKPOINTING_KEEP: [matmul]}", "does nothing: MODEL.ACTIVATION_CHECKPOINTING names no subm"),
    ("MODEL: {DEVICE: gpu}", 'unknown device \'gpu\'; use "auto", "cpu", "cuda", "cuda:N" or "mps"'),
]
DATA = [
    ("DATASETS: {TRAIN: [synthetics]}", "unknown dataset 'synthetics'; did you mean 'synthetic'?"),
    ("DATASETS: {TRAIN: synthetic}", "expected a list of components, got 'synthetic'; write [\"synthetic\"]"),
    ("DATASETS: {TRAIN: []}", "DATASETS.TRAIN: is not set; give a --config-file that sets it"),
    ("DATASETS: {TRAIN: [{NAME: synthetic, ARGS: {sise: 3}}]}", "takes no argument 'sise'; did you mean 'size'?"),
    ("DATASETS: {TRAIN: ['wrong_parts:MissingFile']}", "No such file or directory: 'no/such/file.csv' (wrong_"),
    ("DATASETS: {TRAIN: ['wrong_parts:Raises']}", "DATASETS.TRAIN[0] (wrong_parts:Raises): KeyError: \"no column 'lab"),
    ("DATASETS: {TRAIN: ['wrong_parts:NoLength']}", "NoLength has __getitem__() but no __len__(); it needs both"),
    ("DATASETS: {TRAIN: [{NAME: 'wrong_parts:rows', ARGS: {size: 0}}]}", "DATASETS.TRAIN[0]: the data set wrong"),
    ("DATASETS: {TEST: [synthetic, synthetic]}", 'give one of them another name, {NAME: "synthetic", AS: "other"}'),
    ("DATALOADER: {SAMPLER_TRAIN: EpochSampelr}", "did you mean 'EpochSampler'?"),
    ("DATALOADER: {COLLATE_FN: {NAME: padcollate}}", "did you mean 'pad_collate'?"),
    ("DATALOADER: {TRAIN_COLLATE_FN: {NAME: padcollate}}", "TRAIN_COLLATE_FN.NAME: "),
    ("DATALOADER: {BATCH_SIZE: 100, DROP_LAST: True}", "no batch is left. Use smaller batches, or set DROP_LAST"),
]
BY_METRIC = "NAME: 'torch.optim.lr_scheduler:ReduceLROnPlateau', LR_SCHEDULER_METRIC: synthetic/accuracy"
SOLVER = [
    ("SOLVER: {OPTIMIZER: {NAME: AdamWW}}", "unknown optimizer 'AdamWW'; did you mean 'AdamW'?"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {beta: 0.9}}}", "takes no argument 'beta'; did you mean 'betas'?"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {betas: [2.0, 3.0]}}}", "Invalid beta parameter at index 0: 2.0"),
    ("SOLVER: {OPTIMIZER: {NAME: AdamW, ARGS: {lr: 0.9}}}", "set the learning rate with SOLVER.BASE_LR"),
    ("SOLVER: {LR_SCHEDULER_NAME: WarmupCosine}", "did you mean 'WarmupCosineLR'?"),
    ("SOLVER: {LR_SCHEDULER_NAME: 'torch.optim.lr_scheduler:ReduceLROnPlateau'}", "needs the name of a metric"),
    (f"SOLVER: {{LR_SCHEDULER_{BY_METRIC}}}", "TEST.EVAL_PERIOD: is 0, so ReduceLROnPlateau has no effect"),
    ("SOLVER: {STEPS: 30}", "30 is not a list; write lengths as (3000, 4000) or ('10ep', '15ep')"),
    ("SOLVER: {PARAM_GROUPS: [{PARAMS: backbone, LR_FACTOR: 0.1}]}", "no class that matches 'backbone'. Submodules:"),
    ("SOLVER: {PARAM_GROUPS: [{PARAM: '0', LR_FACTOR: 0.1}]}", "a rule takes no argument 'PARAM'; did you mean 'PAR"),
    ("SOLVER: {ACCUMULATION_STEPS: 17}", "a batch of 16 samples (DATALOADER.BATCH_SIZE) cannot be cut into 17"),
    ("SOLVER: {AMP: {ENABLED: True, DTYPE: fp16}}", "'fp16' is not one of 'bfloat16', 'float16'"),
]
HOOKS = [
    ("HOOKS: [LRScheduler]", "HOOKS[0]: this run already has a hook LRScheduler; remove this one"),
    ("HOOKS: [EarlyStoping]", "HOOKS[0].NAME: unknown hook 'EarlyStoping'; did you mean 'EarlyStopping'?"),
    ("HOOKS: {EMA: {decay: 0.9}}", "expected a list of components, got {'EMA': {'decay': 0.9}}; write [{NAME: ..., AR"),
    ("HOOKS: [{NAM: EMA}]", "a component here has the keys NAME, ARGS, not 'NAM'; did you mean 'NAME'?"),
    ("HOOKS: [{NAME: EMA, ARGS: {deacy: 1}}]", "EMA takes no argument 'deacy'; did you mean 'decay'?"),
    ("HOOKS: [{NAME: EMA, ARGS: {decay: 2.0}}]", "HOOKS[0] (EMA): EMA: decay must be at least 0 and less than 1"),
    ("HOOKS: [{NAME: EvalHook, ARGS: {period: 3}}]", "HOOKS[0].ARGS.period: EvalHook takes no argument"),
    ("HOOKS: ['wrong_parts:Watcher']", "HOOKS[0].ARGS.every: Watcher needs the argument 'every', which is not given"),
    ("HOOKS: ['wrong_parts:NotAHook']", "'wrong_parts:NotAHook' cannot be the hook: it is not a subclass of HookBase"),
    ("HOOKS: ['wrong_parts:FailsToStart']", "HOOKS[0] (wrong_parts:FailsToStart): RuntimeError: no connection to the"),
    ("HOOKS: [IterationTimer]", "HOOKS[0]: this run already has a hook IterationTimer; remove this one"),
    ("HOOKS: [{NAME: TimeLimit, ARGS: {limit: 2h}}]\nSOLVER: {TIME_LIMIT: 1h}", "TimeLimit"),
    ("HOOKS: [{NAME: EarlyStopping, ARGS: {metric: synthetic/acuracy}}]", "did you mean 'synthetic/accuracy'?"),
    ("LOG: {WRITERS: [Tensorboard]}", "unknown writer 'Tensorboard'; did you mean 'TensorboardXWriter'?"),
    ("TEST: {METRICS: [Acuracy]}", "unknown metric 'Acuracy'; did you mean 'Accuracy'?"),
    (
        "TEST: {METRICS: ['wrong_parts:one_argument']}",
        "A function that computes one takes two arguments, outputs and targets",
    ),
    ("TEST: {METRICS: []}", "TEST.METRICS is empty"),
    ("TEST: {EXPECTED_RESULTS: [[synthetic, accuracy, 0.9]]}", "is not [set, metric, expected value, tolerance]"),
    ("TEST: {EXPECTED_RESULTS: [[synthetic, accuracy, '0.9', 0.1]]}", "['synthetic', 'accuracy', '0.9', 0.1] is not ["),
    (
        "TEST: {EXPECTED_RESULTS: [[a, accuracy, 0.9, 0.1]]}",
        "TEST.EXPECTED_RESULTS: there is no metric 'a/accuracy' among synthetic/",
    ),
    ("TEST: {PREDICTIONS_FORMAT: csv}", "'csv' is not one of 'jsonl', 'npz'"),
    ("CHECKPOINT: {BEST: {METRIC: synthetic/acc}}", "did you mean 'synthetic/accuracy'?"),
    ("CHECKPOINT: {BEST: {KEEP: 0}}", "CHECKPOINT.BEST.KEEP: must be at least 1"),
    ("CHECKPOINT: {LOAD_BEST_AT_END: True}", "CHECKPOINT.LOAD_BEST_AT_END: needs CHECKPOINT.BEST.METRIC"),
]
FILES_AND_RANKS = [
    ("MODEL: {WEIGHTS: bse.yaml}", "MODEL.WEIGHTS: there is no file bse.yaml; did you mean 'base.yaml'?"),
    ("MODEL: {WEIGHTS: base.yaml}", "base.yaml is corrupt, or is not a checkpoint"),
    ("MODEL: {WEIGHTS: mine}", "MODEL.WEIGHTS: mine is a folder without last_checkpoint"),
    ("MODEL: {WEIGHTS: /dev/null}", "there is no file /dev/null"),
    ("MODEL: {WEIGHTS: done, WEIGHTS_FROM: ema}", "MODEL.WEIGHTS_FROM: 'ema' is not one of "),
    ("MODEL: {WEIGHTS: done, WEIGHTS_STRICT: True, ARGS: {hidden: [5]}}", "done does not fit the model exactly"),
    ("MODEL: {WEIGHTS: other.pth}", "other.pth"),
    ("MODEL: {WEIGHTS_OPTIMIZER: True}", "MODEL.WEIGHTS_OPTIMIZER: needs MODEL.WEIGHTS, the checkpoint to load"),
    ("OUTPUT_DIR: ''", "OUTPUT_DIR: is empty; give the run a folder"),
    ("OUTPUT_DIR: base.yaml", "base.yaml is not a folder"),
    ("OUTPUT_DIR: base.yaml/run", "OUTPUT_DIR: "),
    ("OUTPUT_DIR: s3://bucket/run", "is a URI; a run writes to a local folder"),
    ("PARALLEL: {NAME: dpp}", "PARALLEL.NAME: unknown strategy 'dpp'; did you mean 'ddp'?"),
    ("PARALLEL: {NAME: ddp, ARGS: {find_unused: True}}", "did you mean 'find_unused_parameters'?"),
]
CONFIGS = [*KEYS, *MODEL, *DATA, *SOLVER, *HOOKS, *FILES_AND_RANKS]


@pytest.mark.parametrize(("line", "says"), CONFIGS, ids=[line[:70] for line, _ in CONFIGS])
def test_a_wrong_config_is_refused(line, says, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    Path("sub/case.yaml").write_text(f"_BASE_: ../base.yaml\n{line}\n")
    assert_refused(folder, says, lambda: run_command(["train", "--config-file", "sub/case.yaml"], capsys))
