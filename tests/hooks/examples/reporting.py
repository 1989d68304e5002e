"""Hooks that report progress elsewhere."""

from collections.abc import Callable

from hookline.hooks import HookBase


class Notifier(HookBase):
    """Sends a message when training fails or ends; ``send(text)`` posts it, for example to Slack."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send

    def on_exception(self, error: BaseException) -> None:
        where = "; ".join(getattr(error, "__notes__", []))
        self.send(f"failed on rank {self.trainer.comm.get_rank()}: {type(error).__name__}: {error} {where}".rstrip())

    def after_train(self) -> None:
        if not self.trainer.failed and self.trainer.comm.is_main_process():
            self.send(f"ended at iteration {self.trainer.iter} of {self.trainer.max_iter}")
