"""What a person's script does with configs and trainers: tools/check_types.sh checks that type checkers accept it."""

from hookline.config import CfgNode, get_cfg
from hookline.engine import DefaultTrainer, HookBase


def add_my_config(cfg: CfgNode) -> None:
    cfg.MY = CfgNode()
    cfg.SOLVER.MY_KEY = 3


cfg = get_cfg()
add_my_config(cfg)
cfg.SOLVER.MAX_ITER = "20ep"
rate: float = cfg.clone().SOLVER.BASE_LR
folder: str = DefaultTrainer(cfg).cfg.OUTPUT_DIR


class Hook(HookBase):
    def after_step(self) -> None:
        if self.trainer.cfg.SOLVER.NESTEROV and self.trainer.iter > 3:
            self.trainer.storage.put_scalar("mine", cfg.MY.KEY)
