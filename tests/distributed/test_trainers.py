"""Trainers in two ranks: what they decide together, and what hooks see."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

TRAINERS = """
import logging, warnings
from torch.nn.parallel import DistributedDataParallel
from hookline.engine import HookBase, SimpleTrainer, hooks
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.parallel.base import DDP, STRATEGY_REGISTRY, Strategy, build_strategy
from hookline.engine.train_loop import TrainerBase
from hookline.hooks import CallbackHook, Every, EventWriter, StopTraining, get_event_storage

class Steps(TrainerBase):
    # Ranks wait for each other in each step, as where they exchange gradients, and do not take equally long.
    def run_step(self):
        time.sleep(0.002 * comm.get_rank())
        torch.distributed.all_reduce(torch.ones(1))

def agreed(hooks, steps=100000):
    trainer = Steps()
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

def decisions(results):
    _, result = agreed([on_rank(1, 5, lambda t: t.request_stop("rank 1 had enough", 75))])
    all_same(result)
    results["stop"] = [result.reason, result.exit_code, result.iteration > 5]

    def raise_stop(trainer):
        raise StopTraining("a hook raised it")
    _, result = agreed([on_rank(0, 3, raise_stop)])
    results["raised stop"] = all_same(result).reason

    # Both ask for something else: the first rank's reason counts.
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

    # Seconds are those of the first rank's clock: however far apart the ranks' clocks are.
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

    # How often ranks ask each other depends on how long steps take.
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
    # The writer and the checkpointer on the first rank alone; DDP by hand.
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
    # Every rank has the writer: what all ranks' hooks see is the mean over ranks.
    trainer = trainer_of(DDP().wrap(model(), torch.device("cpu")))
    recorder = Recorder()
    own = []
    class Own(HookBase):
        def before_backward(self, losses):
            own.append(losses.item())
    trainer.register_hooks([Own(), hooks.IterationTimer(warmup_iter=0), hooks.PeriodicWriter([recorder], period=2)])
    trainer.train(0, 7)
    both = comm.all_gather(own)
    assert both[0] != both[1]
    means = [(a + b) / 2 for a, b in zip(*both)]
    shown = [value for value, _ in trainer.storage.history("total_loss").values()]
    all_same(shown)
    results["means"] = max(abs(a - b) for a, b in zip(means, shown))
    results["losses of all ranks"] = [len(shown), recorder.rows[0][1]["total_loss"] == shown[1]]
    results["times"] = sorted(name for name in recorder.rows[0][1] if name.startswith("ranks/"))

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
    # Of a third party: every rank by itself, and their weights averaged at the end of each forward pass.
    def __init__(self, strength: float = 1.0):
        self.strength = strength

class NanBeside(nn.Module):
    # A loss that no weight has a part in, which is NaN on one rank.
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
    # A mean over items; where a part of the batch has none, its loss and its gradient are 0/0.
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
        trainer = SimpleTrainer(
            wrapped, data, torch.optim.SGD(wrapped.parameters(), 0.1), accumulation_steps=steps
        )
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

    # On all ranks at the end of one step: with the next one.
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

def main(folder):
    logging.disable(logging.CRITICAL)
    results = {}
    decisions(results)
    hook_changes(results)
    nan_beside(results)
    items(results)
    detectron2s_way(results, folder)
    shared_losses(results)
    strategies(results)
    buffers(results)
    unused(results)
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    code, output, results = run_ranks(TRAINERS, 2, tmp_path_factory.mktemp("trainers"))
    assert code == 0, output
    return results


def test_a_stop_that_one_rank_asks_for_is_one_of_all_at_the_same_step(both):
    for results in both:
        assert results["stop"] == ["rank 1 had enough", 75, True]
        assert results["raised stop"] == "a hook raised it"
        assert results["two reasons"] == "0"


def test_what_all_ranks_ask_for_in_one_step_is_done_at_its_end(both):
    assert [results["everywhere"] for results in both] == [["all", 8]] * 2


def test_what_single_ranks_ask_for_is_done_by_all_in_order(both):
    for results in both:
        assert results["requests"] == ["eval", "write", "save", "write"]  # the last one is that of the end


def test_periods_in_seconds_end_at_one_step_on_all_ranks(both):
    assert [results["periods in seconds"] for results in both] == [2, 2]


def test_ranks_do_not_ask_each_other_in_every_step(both):
    assert both[0]["exchanges"] < 100  # of 600 steps


def test_a_step_that_all_ranks_give_up_ends_the_run_in_good_order(both):
    assert [results["given up"] for results in both] == [["given up", 5]] * 2


def test_hooks_registered_on_all_ranks_join_with_the_next_step(both):
    assert [results["joined"] for results in both] == [[[6, True], [7, True]]] * 2


def test_a_hook_registered_on_one_rank_only_is_an_error_on_all_ranks(both):
    for results in both:
        assert results["one has another"] == (
            "hooks were registered or removed on some ranks only (rank 1 has PeriodicWriter, rank 0 does not). "
            "Register and remove hooks on all ranks at the same step"
        )


def test_a_nan_that_no_gradient_shows_stops_all_ranks_at_one_step(both):
    for results in both:
        assert results["nan beside"].startswith("on rank 1 the loss is NaN or infinite at iteration 4")


def test_a_share_without_items_whose_gradient_is_nan_never_reaches_the_weights(both):
    for results in both:
        message, finite = results["no items, raise"]
        assert message.startswith("the gradient of linear.weight and 1 others is NaN or infinite at iteration 2")
        assert "divide by max(num_items, 1)" in message
        assert finite
        assert results["no items, skip"] == [["completed", 4, 1], True]
        (reason, iteration, _), finite = results["no items, stop"]
        assert "at iteration 2" in reason
        assert (iteration, finite) == (3, True)


def test_num_items_is_the_number_in_the_global_batch(both):
    assert [results["items"] for results in both] == [[6.0, 6.0], [6.0, 6.0]]


ALONE = (
    TRAINERS.partition("def main(")[0]
    + """
from hookline.engine.ranks import agreement
agreement._WAIT = 1.0

class Alone(Steps):
    def run_step(self):
        if self.iter == 5 and comm.get_rank() == 1:
            raise {"stop": StopTraining, "interrupt": KeyboardInterrupt}[self.how]("in the step")
        super().run_step()

def main(folder):
    how = (folder / "how").read_text()
    if how == "nan":
        wrapped = DDP().wrap(NanBeside(), torch.device("cpu"))
        SimpleTrainer(wrapped, batches(), torch.optim.SGD(wrapped.parameters(), 0.1)).train(0, 100000)
    trainer = Steps() if how == "hook" else Alone()
    if how == "hook":
        def also(trainer):
            trainer.register_hooks([hooks.PeriodicWriter([], period=1)])
        # With steps that are this fast, the writer asks before the next exchange, and the other rank does not.
        trainer.register_hooks([on_rank(1, 1000, also)])
    trainer.how = how
    trainer.train(0, 100000)
"""
)


def alone(folder, how):
    (folder / "how").write_text(how)
    code, output, _ = run_ranks(ALONE, 2, folder, timeout=50)  # not by the ranks' own timeout, which is 60 s
    return code, output


def test_a_step_that_one_rank_gives_up_is_its_failure_and_what_to_do_instead_is_said_last(tmp_path):
    code, output = alone(tmp_path, "stop")
    assert code == 1
    last = output.rstrip().splitlines()[-1]
    assert "StopTraining('in the step') was raised in step 5 of rank 1, and not on all ranks" in last
    assert "rank(s) 0 did not come within 1 s" in last
    assert "call trainer.request_stop(reason) instead" in last


def test_a_hook_registered_on_one_rank_that_asks_before_the_next_exchange_is_an_error(tmp_path):
    code, output = alone(tmp_path, "hook")
    assert code == 1
    last = output.rstrip().splitlines()[-1]
    assert "hooks were registered or removed on some ranks only: those of rank 1 asked for something" in last
    assert "of other ranks did not within 1 s" in last


@pytest.mark.slow
def test_a_rank_that_is_interrupted_alone_is_named_by_the_launcher(tmp_path):
    code, output = alone(tmp_path, "interrupt")
    assert code == 130
    last = output.rpartition("Rank 1 was interrupted first:")[2]
    assert last.rstrip().endswith("KeyboardInterrupt: in the step")
    assert "failed first" not in output


@pytest.mark.slow
def test_a_nan_that_no_gradient_shows_is_a_failure_of_its_rank_at_once(tmp_path):
    code, output = alone(tmp_path, "nan")
    assert code == 1
    assert "FloatingPointError: on rank 1 the loss is NaN or infinite at iteration 4:" in output.splitlines()[-1]


def test_writers_and_checkpointers_on_the_first_rank_alone_work_as_in_detectron2(both):
    assert both[0]["detectron2's way"] == [1, 3, 5, 7, 8, 9]
    assert both[0]["files"] == ["model_0000003.pth", "model_0000007.pth", "model_final.pth"]
    assert both[0]["names"] == ["bias", "weight"]
    assert both[1]["detectron2's way"] == []


def test_losses_are_the_means_over_ranks_for_all_hooks_of_all_ranks(both):
    for results in both:
        assert results["means"] < 1e-6
        assert results["losses of all ranks"] == [7, True]
        assert results["times"] == [
            "ranks/data_time_max",
            "ranks/data_time_mean",
            "ranks/slowest",
            "ranks/time_max",
            "ranks/time_mean",
        ]


def test_a_strategy_is_chosen_by_its_name_a_third_partys_too(both):
    assert [both[0][name] for name in ("auto", "none", "third")] == ["DDP", "Strategy", 0.5]


def test_before_an_evaluation_all_ranks_have_the_first_ones_buffers(both):
    assert both[0]["buffers"] == both[1]["buffers"] == [True, True]


def test_parameters_that_got_no_gradient_are_named_and_the_keys_that_help_do_help(both):
    for rank, results in enumerate(both):
        assert results["unused"].startswith(
            f"on rank {rank} the losses of the step before did not depend on these parameters: "
            "unused.weight, unused.bias."
        )
        assert "PARALLEL.ARGS.find_unused_parameters" in results["unused"]
        assert results["with find_unused_parameters"] == results["with static_graph"] == "completed"
