"""A sharded save that fails while training continues."""

import time
from pathlib import Path

from hookline.config import get_cfg
from hookline.engine import DefaultTrainer, comm
from hookline.engine.checkpoint import files
from hookline.hooks import HookBase

files.RETRY_AFTER = 0.0


class FolderGone(HookBase):
    """Moves the run's folder away before the first save; with ``comes_back``, moves it back after the failure."""

    def __init__(self, comes_back):
        self.comes_back = comes_back

    def before_save(self, path):
        run = Path(self.trainer.checkpointer.save_dir)
        if comm.is_main_process() and self.trainer.iter == 79:
            run.rename(f"{run}.away")

    def after_step(self):
        time.sleep(0.02)  # ranks exchange requests once a second: at most every 50 steps
        if self.trainer.iter != 81:
            return
        checkpointer = self.trainer.checkpointer
        run, (write, *_) = Path(checkpointer.save_dir), checkpointer._saver.pending
        write.exception(30)
        if comm.is_main_process() and self.comes_back:
            Path(f"{run}.away").rename(run)


def main(folder, on_error, comes_back):
    cfg = get_cfg()
    cfg.merge_from_file(str(Path(__file__).parents[3] / "configs/synthetic/mlp.yaml"))
    options = [
        "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder / "run"), "PARALLEL.NAME", "fsdp2", "DATASETS.TEST", "()",
        "CHECKPOINT.BEST.METRIC", "", "SOLVER.MAX_ITER", "161", "SOLVER.CHECKPOINT_PERIOD", "80", "LOG.PERIOD", "80",
        "CHECKPOINT.ASYNC", "True", "CHECKPOINT.ON_ERROR", on_error,
    ]  # fmt: skip
    cfg.merge_from_list(options)
    if comm.is_main_process():
        (folder / "run").mkdir()
    comm.barrier("folder")
    trainer = DefaultTrainer(cfg)
    trainer.register_hooks([FolderGone(comes_back == "True")])
    trainer.train()
