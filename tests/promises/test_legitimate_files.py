"""Files that people have in OUTPUT_DIR, and folders of other runs: a run trains there and harms no file of theirs."""

import contextlib
import os
import shutil
from pathlib import Path

from legitimate import CONFIG, Trainer, check, keep, merged, mine, train, usual

from hookline.cli import main
from hookline.engine.checkpoint import save_weights
from hookline.hooks import CallbackHook, HookBase


def test_keeps_the_output_of_the_shell_in_log_txt(args):
    """``python train_net.py > out/log.txt``."""
    os.mkdir("out")
    with open("out/log.txt", "a") as file, contextlib.redirect_stdout(file):
        print("begins", flush=True)
        keep("out/log.txt")
        check(usual(args))


def test_keeps_the_config_in_the_folder(args):
    mine("out/config.yaml", CONFIG)
    args.config_file = "out/config.yaml"
    check(usual(args))


def test_saves_the_best_weights_with_a_hook(args):
    class SavesBest(HookBase):
        def after_step(self):
            save_weights(self.trainer.model, os.path.join(self.trainer.cfg.OUTPUT_DIR, "model_best.pth"))
            if self.trainer.iter == 3:
                keep("out/model_best.pth")

    trainer = Trainer(merged(args))
    trainer.register_hooks([SavesBest()])
    trainer.resume_or_load(resume=False)
    check(trainer.train())


def test_has_notes_code_and_weights_beside_the_run(args):
    for name in ("notes.md", "metrics.csv.bak", "code/model.py", "previous_001/notes.md", "model_final.pth.mine"):
        mine(f"out/{name}")
    mine("out/model_final.pth", b"weights of a zoo")
    usual(args)
    check(usual(args))


def test_opens_a_file_after_the_trainer_is_built(args):
    trainer = Trainer(merged(args))
    mine(os.path.join(trainer.cfg.OUTPUT_DIR, "results.csv"), "step,loss\n")
    trainer.resume_or_load(resume=False)
    check(trainer.train())


def test_changes_the_working_folder_after_the_trainer_is_built(args):
    trainer = Trainer(merged(args))
    trainer.resume_or_load(resume=False)
    os.mkdir("elsewhere")
    with contextlib.chdir("elsewhere"):
        result = trainer.train()
        assert os.listdir() == []
    check(result)


def test_starts_a_project_in_a_fresh_git_repository(args):
    os.makedirs("out/.git")
    mine("out/.git/HEAD", "ref: refs/heads/main")
    assert main(["new", "out"]) == 0
    check(usual(args))


# ---------------------------------------------------------------------------- a folder of another run


def test_starts_from_the_weights_of_the_earlier_run_in_the_folder(args):
    usual(args)
    weights = Path("out/model_final.pth").read_bytes()
    args.opts += ["MODEL.WEIGHTS", "out/model_final.pth"]
    check(usual(args))
    assert Path("out/previous_001/model_final.pth").read_bytes() == weights


def test_resumes_a_copy_of_a_run_that_goes_on(args):
    """``cp -r running out``, and ``--resume`` in the copy while the other run goes on."""
    results = []

    def copy(trainer):
        if trainer.iter == 2:
            shutil.copytree("running", "out")
            cfg = merged(args)
            cfg.merge_from_list(["OUTPUT_DIR", "out"])
            results.append(train(cfg, resume=True))

    cfg = merged(args)
    cfg.merge_from_list(["OUTPUT_DIR", "running", "SOLVER.CHECKPOINT_PERIOD", 2, "SOLVER.MAX_ITER", 6])
    trainer = Trainer(cfg)
    trainer.register_hooks([CallbackHook(after_step=copy)])
    trainer.resume_or_load(resume=False)
    assert trainer.train().iteration == 6
    shutil.rmtree("running")
    check(results[0])


def test_resumes_a_copy_without_hidden_files(args):
    trainer = Trainer(merged(args))
    trainer.register_hooks([CallbackHook(after_step=lambda t: t.iter == 1 and t.request_stop("enough", 75))])
    trainer.resume_or_load(resume=False)
    with contextlib.suppress(SystemExit):
        trainer.train()
    mine("out/notes.md")
    shutil.rmtree("out/.hookline")
    check(train(merged(args), resume=True))


def test_starts_a_new_run_over_a_copy_without_hidden_files(args):
    usual(args)
    shutil.rmtree("out/.hookline")
    check(usual(args))
    assert Path("out/previous_001/model_final.pth").exists()
