"""What a run of several ranks does about a sharded checkpoint that could not be written while it trained."""

import re

from ranks import ROOT, run_ranks

CODE = f"""
from hookline.engine import DefaultTrainer
from hookline.engine.checkpoint import saver
from hookline.hooks import HookBase

saver.RETRY_AFTER = 0.0

class FolderGone(HookBase):
    # It is away when the first save begins, and back once that has failed, or not; the next one is due much later.
    def before_save(self, path):
        run = Path(self.trainer.checkpointer.save_dir)
        if comm.is_main_process() and self.trainer.iter == 79:
            run.rename(f"{{run}}.away")

    def after_step(self):
        time.sleep(0.02)  # ranks ask each other once a second: that is every 50 steps at most
        if self.trainer.iter != 81:
            return
        checkpointer = self.trainer.checkpointer
        run, end = Path(checkpointer.save_dir), time.monotonic() + 30
        while not checkpointer.poll() and time.monotonic() < end:
            time.sleep(0.01)
        if comm.is_main_process() and COMES_BACK:
            Path(f"{{run}}.away").rename(run)

def main(folder):
    cfg = get_cfg()
    cfg.merge_from_file({str(ROOT / "configs/synthetic/mlp.yaml")!r})
    cfg.merge_from_list([
        "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder / "run"), "PARALLEL.NAME", "fsdp2", "DATASETS.TEST", "()",
        "SOLVER.MAX_ITER", "161", "SOLVER.CHECKPOINT_PERIOD", "80", "LOG.PERIOD", "80",
        "CHECKPOINT.ASYNC", "True", "CHECKPOINT.ON_ERROR", ON_ERROR,
    ])
    if comm.is_main_process():
        (folder / "run").mkdir()
    comm.barrier("folder")
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([FolderGone()])
    trainer.train()
"""


def run(folder, on_error, comes_back=True):
    given = f"ON_ERROR, COMES_BACK = {on_error!r}, {comes_back}\n"
    code, output, _ = run_ranks(given + CODE, 2, folder, timeout=120)
    return code, output, sorted(int(path.stem[6:]) for path in (folder / "run").glob("model_0*.pth"))


def test_it_ends_the_run_on_all_ranks_soon_after(tmp_path):
    code, output, saved = run(tmp_path, "stop")
    assert code == 1
    assert saved == []
    assert "model_0000079.pth: No such file or directory" in output
    [iteration] = set(re.findall(r"in hook PeriodicCheckpointer\.on_save, at iteration (\d+)", output))
    assert 79 < int(iteration) < 159


def test_it_is_made_up_for_soon_after_if_the_run_is_to_go_on(tmp_path):
    code, output, saved = run(tmp_path, "continue")
    assert code == 0, output
    assert "Training goes on without a checkpoint" in output
    anew, due = saved
    assert 79 < anew < due == 159
    assert (tmp_path / "run/last_checkpoint").read_text() == "model_final.pth"


def test_it_is_made_up_for_once_and_then_waits_for_the_next_that_is_due(tmp_path):
    code, output, saved = run(tmp_path, "continue", comes_back=False)
    assert code == 1  # the end cannot be saved either
    assert saved == []
    failed = {int(iteration) for iteration in re.findall(r"cannot save \S+/model_(\d+)\.pth", output)}
    assert failed >= {79, 159}
    assert len([iteration for iteration in failed if 79 < iteration < 159]) == 1
