"""Joint decisions of several ranks, and the values that their hooks see."""

import logging
import time
import warnings

import torch
from results import write_result
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.config import ConfigError, get_cfg
from hookline.engine import HookBase, SimpleTrainer, comm, hooks
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.parallel import DDP, FSDP2, STRATEGY_REGISTRY, Mesh, Strategy, build_strategy
from hookline.engine.parallel.base import check_same_weights
from hookline.engine.ranks import agreement
from hookline.engine.train_loop import TrainerBase
from hookline.hooks import CallbackHook, EventWriter, Every, StopTraining, get_event_storage
from hookline.hooks.evaluation import Monitor


class Steps(TrainerBase):
    """Ranks wait for each other in each step, as for gradients. Rank 1 is slower."""

    def run_step(self):
        time.sleep(0.002 * comm.get_rank())
        torch.distributed.all_reduce(torch.ones(1))


class StopsInItsMethod(Steps):
    def after_step(self):
        super().after_step()
        if comm.get_rank() == 1 and self.iter >= 3:
            raise StopTraining("a method raised it")


def agreed(hooks, steps=100000, cls=Steps):
    trainer = cls()
    trainer.register_hooks(hooks)
    return trainer, trainer.train(0, steps)


def on_rank(rank, at, do):
    def act(trainer):
        if comm.get_rank() == rank and trainer.iter == at:
            do(trainer)

    return CallbackHook(before_step=act)


def all_same(value):
    values = comm.all_gather(value)
    assert values[0] == values[1], values
    return value


class OwnStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.layer(x)

    def train_step(self, batch):
        return {"loss": self(batch).sum()}


def train_step(results):
    model = DistributedDataParallel(OwnStep())
    for _ in range(2):  # the second call must find the module as it was
        model.zero_grad()
        adapter = ModelAdapter()
        adapter.losses(model, torch.full((1, 2), 1.0 + comm.get_rank()))["loss"].backward()
    trainer = SimpleTrainer(model, [torch.ones(1, 2)], torch.optim.SGD(model.parameters(), lr=0.1))
    gathered = trainer.gather(torch.full((1,), 0.5)).tolist()
    results["train_step"] = [model.module.layer.weight.grad.tolist(), gathered, "forward" not in vars(model.module)]


def decisions(results):
    _, result = agreed([on_rank(1, 5, lambda t: t.request_stop("rank 1 had enough", 75))])
    all_same(result)
    results["stop"] = [result.reason, result.exit_code, result.iteration > 5]

    def raise_stop(trainer):
        raise StopTraining("a hook raised it")

    _, result = agreed([on_rank(0, 3, raise_stop)])
    results["raised stop"] = [all_same(result).reason]
    results["raised stop"].append(all_same(agreed([], cls=StopsInItsMethod)[1]).reason)

    # Both stop in the same step: the reason of rank 0 counts.
    _, result = agreed([on_rank(0, 5, lambda t: t.request_stop("0")), on_rank(1, 5, lambda t: t.request_stop("1"))])
    results["two reasons"] = all_same(result).reason

    _, result = agreed([CallbackHook(after_step=lambda t: t.iter == 7 and t.request_stop("all", everywhere=True))])
    results["everywhere"] = [all_same(result).reason, result.iteration]

    seen = []
    listener = CallbackHook(
        on_save=lambda t: seen.append(["save", t.iter]),
        on_write=lambda t: seen.append(["write", t.iter]),
        on_eval=lambda t: seen.append(["eval", t.iter]),
    )
    asks = [on_rank(1, 2, lambda t: t.request_eval()), on_rank(0, 2, lambda t: (t.request_save(), t.request_write()))]
    agreed([*asks, listener], 200)
    results["requests"] = all_same([event for event, _ in seen])
    all_same(seen)

    # All ranks use the clock of rank 0.
    at = []
    every = Every("0.5s")
    if comm.get_rank() == 1:
        time.sleep(0.3)

    def count(trainer):
        if every(trainer):
            at.append(trainer.iter)
        if len(at) == 2:
            trainer.request_stop("twice", everywhere=True)

    agreed([CallbackHook(before_train=lambda t: every.start(), after_step=count)])
    results["periods in seconds"] = len(all_same(at))

    # The number of exchanges depends on how long steps take.
    trainer = Steps()
    numbers = []
    trainer.register_hooks([CallbackHook(after_step=lambda t: numbers.append(t._agreement.next_iter))])
    trainer.train(0, 600)
    exchanges = sorted(set(all_same(numbers)))
    results["exchanges"] = len(exchanges)


class Recorder(EventWriter):
    def __init__(self):
        self.rows = []

    def write(self):
        storage = get_event_storage()
        self.rows.append((storage.iter, {name: value for name, (value, _) in storage.latest().items()}))


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def batches():
    torch.manual_seed(10 + comm.get_rank())
    return [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(5)]


def trainer_of(model, **arguments):
    adapter = ModelAdapter(nn.CrossEntropyLoss())
    return SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), 0.1), adapter=adapter, **arguments)


def detectron2s_way(results, folder):
    # The writer and the checkpointer are on rank 0 only.
    wrapped = DistributedDataParallel(model())
    trainer = trainer_of(wrapped)
    checkpointer = Checkpointer(wrapped, str(folder / "d2"), trainer=trainer)
    recorder = Recorder()
    mine = [hooks.IterationTimer()]
    if comm.is_main_process():
        mine += [hooks.PeriodicCheckpointer(checkpointer, 4), hooks.PeriodicWriter([recorder], period=2)]
    trainer.register_hooks(mine)
    trainer.train(0, 9)
    results["detectron2's way"] = [iteration for iteration, _ in recorder.rows]
    results["files"] = sorted(path.name for path in (folder / "d2").glob("*.pth")) if comm.is_main_process() else []
    comm.synchronize()
    if comm.is_main_process():
        saved = torch.load(folder / "d2" / "model_final.pth", weights_only=True)
        results["names"] = sorted(saved["model"])


def shared_losses(results):
    # With the writer on every rank, all hooks see the mean over ranks.
    trainer = trainer_of(DDP().wrap(model(), torch.device("cpu")))
    recorder = Recorder()
    own = []

    class Own(HookBase):
        def before_backward(self, losses):
            own.append(losses.item())

        def after_step(self):
            rank, storage = comm.get_rank(), self.trainer.storage
            for how in ("mean", "sum", "max", "min"):
                storage.put_scalar(f"own/{how}", self.trainer.iter + rank, over_ranks=how)
            if rank == 0 or self.trainer.iter % 2:  # rank 1 puts none in even iterations
                storage.put_scalar("own/some", 10.0 * rank, over_ranks="mean")
            if self.trainer.iter in (1, 5, 6):
                storage.put_scalar("own/rare", self.trainer.iter + rank, smoothing_hint=False, over_ranks="sum")

    trainer.register_hooks([Own(), hooks.IterationTimer(warmup_iter=0), hooks.PeriodicWriter([recorder], period=2)])
    trainer.train(0, 7)
    both = comm.all_gather(own)
    assert both[0] != both[1]
    means = [(a + b) / 2 for a, b in zip(*both, strict=True)]
    shown = [value for value, _ in trainer.storage.history("total_loss").values()]
    all_same(shown)
    results["means"] = max(abs(a - b) for a, b in zip(means, shown, strict=True))
    results["losses of all ranks"] = [len(shown), recorder.rows[0][1]["total_loss"] == shown[1]]
    own_values = trainer.storage.histories("own/")
    results["own"] = {name: [value for value, _ in history.values()] for name, history in own_values.items()}
    monitored = {how: Monitor(f"own/{how}").value(trainer)[0] for how in ("mean", "sum", "max", "min")}
    results["monitored"] = monitored
    results["times"] = [name for name in recorder.rows[0][1] if "rank" in name]


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def unused(results):
    trainer = trainer_of(DDP().wrap(Halves(), torch.device("cpu")))
    try:
        trainer.train(0, 3)
    except RuntimeError as error:
        results["unused"] = str(error)
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = trainer_of(DDP(**options).wrap(Halves(), torch.device("cpu")))
            results[f"with {next(iter(options))}"] = trainer.train(0, 3).reason


@STRATEGY_REGISTRY.register()
class Gossip(Strategy):
    """A user's strategy."""

    def __init__(self, strength: float = 1.0):
        self.strength = strength


class NanBeside(nn.Module):
    """Has a loss that depends on no weight and becomes NaN on rank 1."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.steps = 0

    def forward(self, batch):
        self.steps += 1
        nan = comm.get_rank() == 1 and self.steps == 5
        return {"loss": self.linear(batch[0]).square().mean(), "beside": torch.tensor(float("nan") if nan else 0.0)}


def nan_beside(results):
    wrapped = DDP().wrap(NanBeside(), torch.device("cpu"))
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    trainer = SimpleTrainer(wrapped, batches(), optimizer, nonfinite="stop")
    result = trainer.train(0, 2000)
    results["nan beside"] = all_same([result.reason, result.iteration])[0]


class Masked(nn.Module):
    """Returns a mean over items. For a share without items, the loss and its gradient are 0/0."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, batch):
        x, mask = batch
        return {"loss": (self.linear(x).square()[:, 0] * mask).sum() / mask.sum(), "num_items": mask.sum()}


def items(results):
    x, first = torch.ones(4, 3), comm.is_main_process()
    full, none = torch.ones(4), torch.ones(4) if first else torch.zeros(4)
    for policy in ("raise", "skip", "stop"):
        wrapped = DDP().wrap(Masked(), torch.device("cpu"))
        data = [(x, full), (x, full), (x, none), (x, full)]
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        trainer = SimpleTrainer(wrapped, data, optimizer, nonfinite=policy)
        try:
            result = trainer.train(0, 4)
            ended = [result.reason, result.iteration, trainer.nonfinite.steps]
        except FloatingPointError as error:
            ended = str(error)
        finite = all(bool(weight.isfinite().all()) for weight in wrapped.parameters())
        results[f"no items, {policy}"] = [all_same(ended), finite]
    counts = []
    for steps in (1, 2):
        wrapped = DDP().wrap(Masked(), torch.device("cpu"))
        data = [(x, torch.tensor([1.0, float(first), 1.0, float(first)]))]
        trainer = SimpleTrainer(wrapped, data, torch.optim.SGD(wrapped.parameters(), 0.1), accumulation_steps=steps)
        trainer.train(0, 1)
        counts.append(trainer.storage.latest()["num_items"][0])
    results["items"] = all_same(counts)


class GivesUp(Steps):
    def run_step(self):
        super().run_step()
        if self.iter == 5:
            raise StopTraining("given up")


def hook_changes(results):
    result = GivesUp().train(0, 100)
    results["given up"] = [all_same(result).reason, result.iteration]

    # On all ranks.
    seen = []

    def join(trainer):
        if trainer.iter == 5:
            time.sleep(0.1 * comm.get_rank())
            trainer.register_hooks([CallbackHook(before_step=lambda t: seen.append([t.iter, t.ranks_in_sync]))])

    agreed([CallbackHook(after_step=join)], 8)
    results["joined"] = seen

    # On one rank alone.
    def also(trainer):
        trainer.register_hooks([hooks.PeriodicWriter([], period=100000)])

    trainer = Steps()
    trainer.register_hooks([on_rank(1, 20, also), hooks.PeriodicWriter([], period=20)])
    try:
        trainer.train(0, 100000)
    except RuntimeError as error:
        results["one has another"] = all_same(str(error))


def strategies(results):
    cfg = get_cfg()
    results["auto"] = type(build_strategy(cfg)).__name__
    cfg.PARALLEL.NAME = "none"
    results["none"] = type(build_strategy(cfg)).__name__
    cfg.merge_from_list(["PARALLEL.NAME", "Gossip", "PARALLEL.ARGS", {"strength": 0.5}])
    results["third"] = build_strategy(cfg).strength


def buffers(results):
    torch.manual_seed(comm.get_rank())
    norm = DDP().wrap(nn.BatchNorm1d(3), torch.device("cpu"))
    norm(torch.randn(4, 3))
    before = comm.all_gather(norm.module.running_mean.tolist())
    DDP().before_evaluation(norm)
    results["buffers"] = [before[0] != before[1], all_same(norm.module.running_mean.tolist()) == before[0]]


def drift(results, folder):
    def message(do, period=0):
        wrapped = DDP().wrap(model(), torch.device("cpu"))
        wrapped.module.frozen = nn.Parameter(torch.full((2,), float(comm.get_rank())), requires_grad=False)
        trainer = trainer_of(wrapped)
        hooks_of_rank = [on_rank(1, 5, do)]
        if period:
            hooks_of_rank.append(hooks.PeriodicCheckpointer(Checkpointer(wrapped, str(folder / "drift")), period))
        elif comm.is_main_process():
            hooks_of_rank.append(hooks.IterationTimer())
        trainer.register_hooks(hooks_of_rank)
        try:
            return trainer.train(0, 12).reason
        except RuntimeError as error:
            return all_same([str(error), trainer.finished_iter])

    def set_rate(trainer):
        trainer.optimizer.param_groups[0]["lr"] = 0.5

    def add(value):
        @torch.no_grad()
        def change(trainer):
            trainer.model.module.weight[1, 0] += value

        return change

    results["drift"] = {
        "rate": message(set_rate),
        "weight": message(add(0.5), period=4),
        "at the end": message(add(0.5)),
        "rounding": message(add(1e-6), period=4),
    }
    with torch.no_grad():
        copies = Mesh(replicate=2, shard=1, param_dtype="bfloat16").wrap(model(), torch.device("cpu"))
        check_same_weights(copies, 0)
        copies.bias.to_local()[0] += comm.get_rank()
        try:
            check_same_weights(copies, 0)
        except RuntimeError as error:
            results["drift"]["copies of shards"] = all_same(str(error))


def widths(results):
    try:
        FSDP2().wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 + comm.get_rank())), torch.device("cpu"))
    except ConfigError as error:
        results["widths"] = str(error)


def main(folder):
    logging.disable(logging.CRITICAL)
    results = {}
    train_step(results)
    decisions(results)
    hook_changes(results)
    nan_beside(results)
    items(results)
    detectron2s_way(results, folder)
    shared_losses(results)
    strategies(results)
    buffers(results)
    drift(results, folder)
    widths(results)
    unused(results)
    write_result(folder, results)


# ---------------------------------------------------------------------- one rank alone


class Alone(Steps):
    def run_step(self):
        if self.iter == 5 and comm.get_rank() == 1:
            raise {"stop": StopTraining, "interrupt": KeyboardInterrupt}[self.how]("in the step")
        super().run_step()


def alone(folder, how):
    agreement._WAIT = 1.0
    if how == "nan":
        wrapped = DDP().wrap(NanBeside(), torch.device("cpu"))
        SimpleTrainer(wrapped, batches(), torch.optim.SGD(wrapped.parameters(), 0.1)).train(0, 100000)
    trainer = Steps() if how == "hook" else Alone()
    if how == "hook":

        def also(trainer):
            trainer.register_hooks([hooks.PeriodicWriter([], period=1)])

        # Steps are fast: the writer makes a request before the next exchange, and rank 0 does not.
        trainer.register_hooks([on_rank(1, 1000, also)])
    trainer.how = how
    trainer.train(0, 100000)
