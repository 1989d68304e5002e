import pytest

from hookline.cli import parser_of
from hookline.engine import default_argument_parser


def test_options_are_those_of_detectron2():
    args = default_argument_parser().parse_args(
        ["--config-file", "a.yaml", "--resume", "--num-gpus", "2", "SOLVER.BASE_LR", "0.1", "SEED", "3"]
    )
    assert (args.config_file, args.resume, args.eval_only, args.num_gpus) == ("a.yaml", True, False, 2)
    assert (args.num_machines, args.machine_rank, args.dist_url) == (1, 0, "auto")
    assert args.opts == ["SOLVER.BASE_LR", "0.1", "SEED", "3"]


@pytest.mark.parametrize("path", ["model_0000999.pth", "output/run", "run", True, False])
def test_resume_takes_a_path_but_no_key_behind_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    words = [] if path is False else ["--resume"] if path is True else ["--resume", path]
    for parser in (default_argument_parser(), parser_of("train")):
        assert parser.parse_known_args([*words, "SOLVER.MAX_ITER", "5"])[0].resume == path
        args = parser.parse_args(["SEED", "3", *words, "SOLVER.MAX_ITER", "5"])
        assert (args.resume, args.opts) == (path, ["SEED", "3", "SOLVER.MAX_ITER", "5"])


@pytest.mark.parametrize("option", ["--local-rank=1", "--local_rank=1"])
def test_the_option_that_torch_distributed_launch_adds_is_accepted(option):
    args = default_argument_parser().parse_args([option, "--resume", "SEED", "3"])
    assert (args.local_rank, args.resume, args.opts) == (1, True, ["SEED", "3"])
