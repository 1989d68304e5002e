"""What a dry run prints of a run's cost."""

import re

import pytest

from hookline.engine import DefaultTrainer, default_argument_parser, run

SMALL = [
    *("MODEL.DEVICE", "cpu", "DATALOADER.BATCH_SIZE", "8", "OUTPUT_DIR", "out"),
    *("MODEL.ARGS", "{'width': 16, 'depth': 2, 'heads': 2, 'block_size': 8}", "DATALOADER.LIMIT_TRAIN_BATCHES", "2"),
]


@pytest.fixture
def dry_run(monkeypatch, tmp_path, capsys):
    """Call a dry run in an empty folder, and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def call(config, *options):
        args = default_argument_parser().parse_args(["--config-file", config, "--dry-run", *options])
        text, printed = run(DefaultTrainer, args), capsys.readouterr().out
        assert set(text.splitlines()) <= set(printed.splitlines())
        assert not list(tmp_path.iterdir())
        return printed

    return call


def test_a_model_that_is_too_large_is_counted_and_not_built(dry_run):
    options = ("--num-gpus", "8", "--num-machines", "8", "--mfu", "0.5", "--peak-flops", "1e15")
    text = dry_run("language/gpt_8b.yaml", *options)
    assert "Estimate for 64 ranks (replicate 1, shard 64, tensor 1):" in text
    assert "parameters: 8,030,261,248" in text
    assert "FLOPs per token: 57.9 G" in text  # 6 * 7.505e9 + 12 * 32 * 4096 * 8192
    assert "weights 479 MiB, gradients 479 MiB, optimizer 957 MiB" in text
    assert "speed at 50% of 1,000 TFLOP/s: 552,539 tokens/s, 8,633 per rank" in text
    assert "The run was not built: it needs 8 machines." in text


@pytest.mark.parametrize("options", [("--num-gpus", "1000"), ("MODEL.ARGS.mlp_width", "14336000")])
def test_what_does_not_fit_here_is_not_built(dry_run, options):
    text = dry_run("language/gpt_8b.yaml", "MODEL.DEVICE", "cpu", *options)
    assert re.search(r"not built: (1000 ranks are too many|the weights need .* TiB)", text)


def test_a_model_that_fits_is_built_and_counted(dry_run):
    text = dry_run("language/gpt.yaml", *SMALL, "SOLVER.OPTIMIZER.NAME", "SGD", "SOLVER.OPTIMIZER.ARGS", "{}")
    assert "SampleText" in text  # the hooks of the built run
    parameters = int(re.search(r"parameters: ([\d,]+)", text)[1].replace(",", ""))
    size = parameters * 4 / 1024
    found = re.search(r"weights ([\d.]+) KiB, gradients ([\d.]+) KiB, optimizer ([\d.]+) KiB", text)
    assert [float(number) for number in found.groups()] == pytest.approx([size] * 3, rel=0.01)  # momentum
    assert "speed at 40% of" in text


def test_the_estimate_comes_before_errors_of_the_data(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--config-file", "language/gpt_1b.yaml", "--dry-run", "MODEL.ARGS.kv_heads", "2", *SMALL]
    with pytest.raises(SystemExit) as end:
        run(DefaultTrainer, default_argument_parser().parse_args(options))
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert "Estimate for 1 rank" in printed.out
    assert "tokens/train" in printed.err


def test_other_models_have_no_speed(dry_run):
    text = dry_run("synthetic/mlp.yaml", "MODEL.DEVICE", "cpu")
    assert "parameters: 420\n" in text
    assert "activations not known" in text
    assert "tokens/s" not in text


@pytest.mark.parametrize(
    ("config", "ranks", "arguments", "words"),
    [
        ("language/gpt_8b.yaml", "64", "{'tensor': 16}", "16 ranks cannot split the kv_heads"),
        ("language/gpt_8b.yaml", "64", "{'tensor': 2, 'plan': {'blocks': ['colwise']}}", "must be a word such as"),
        (
            "language/gpt.yaml",
            "2",
            "{'tensor': 2, 'plan': {'blocks.*.qkv': 'colwise', 'blocks.*.attention_proj': 'rowwise'}}",
            "blocks.0.qkv computes several parts",
        ),
    ],
)
def test_a_plan_is_checked_before_ranks_start(dry_run, capsys, config, ranks, arguments, words):
    options = ("MODEL.DEVICE", "cpu", "--num-gpus", ranks, "PARALLEL.NAME", "mesh", "PARALLEL.ARGS", arguments)
    with pytest.raises(SystemExit):
        dry_run(config, *options)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mfu", "0.4"), "--mfu: is used by --dry-run only"),
        (("--dry-run", "--mfu", "40"), "--mfu 40: must be above 0 and at most 1"),
        (("--dry-run", "--peak-flops", "0"), "--peak-flops 0: must be above 0"),
    ],
)
def test_options_of_dry_runs_are_checked(capsys, options, words):
    with pytest.raises(SystemExit) as end:
        run(DefaultTrainer, default_argument_parser().parse_args(["--config-file", "synthetic/mlp.yaml", *options]))
    assert end.value.code == 2
    assert words in capsys.readouterr().err
