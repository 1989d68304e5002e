from hookline.engine import default_argument_parser


def test_options_are_those_of_detectron2():
    args = default_argument_parser().parse_args(
        ["--config-file", "a.yaml", "--resume", "--num-gpus", "2", "SOLVER.BASE_LR", "0.1", "SEED", "3"]
    )
    assert (args.config_file, args.resume, args.eval_only, args.num_gpus) == ("a.yaml", True, False, 2)
    assert (args.num_machines, args.machine_rank, args.dist_url) == (1, 0, "auto")
    assert args.opts == ["SOLVER.BASE_LR", "0.1", "SEED", "3"]
