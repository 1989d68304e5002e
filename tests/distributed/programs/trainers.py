"""Joint decisions of two ranks, and the values that their hooks see."""

import time
import warnings

import pytest
import torch
from parts import CPU, LOSS, Items, points
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hookline.config import ConfigError
from hookline.engine import SimpleTrainer, comm, hooks
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.modeling import ModelAdapter
from hookline.engine.parallel import DDP, FSDP2, Mesh, rank_sync
from hookline.engine.parallel.copies import check_same_weights
from hookline.engine.train_loop import TrainerBase
from hookline.hooks import CallbackHook, EventWriter, Every, StopTraining, get_event_storage
from hookline.hooks.evaluation import Monitor


class Steps(TrainerBase):
    """Ranks wait for each other in each step, as for gradients. Rank 1 is slower."""

    def run_step(self):
        time.sleep(0.002 * comm.get_rank())
        torch.distributed.all_reduce(torch.ones(1))


def agreed(*hooks, steps=100000):
    """Train with hooks; return the result, which is the same on both ranks."""
    trainer = Steps()
    trainer.register_hooks(hooks)
    result = trainer.train(0, steps)
    assert_same([result.reason, result.exit_code, result.iteration])
    return result


def on_rank(rank, at, do):
    def act(trainer):
        if comm.get_rank() == rank and trainer.iter == at:
            do(trainer)

    return CallbackHook(before_step=act)


def assert_same(value):
    first, second = comm.all_gather(value)
    assert first == second


def model():
    torch.manual_seed(0)
    return nn.Linear(6, 3)


def trainer_of(model, data=None, **arguments):
    data = data or [points(4, 10 * seed + comm.get_rank()).tensors for seed in range(5)]
    return SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), 0.1), **arguments)


# ---------------------------------------------------------------------- decisions


def check_all_ranks_stop_at_the_same_step_when_one_requests_it(folder):
    result = agreed(on_rank(1, 5, lambda t: t.request_stop("rank 1 had enough", 75)))
    assert (result.reason, result.exit_code, result.iteration > 5) == ("rank 1 had enough", 75, True)

    def raise_stop(trainer):
        raise StopTraining("a hook raised it")

    assert agreed(on_rank(0, 3, raise_stop)).reason == "a hook raised it"
    # Both stop in the same step: the reason of rank 0 counts.
    both = [on_rank(rank, 5, lambda t, rank=rank: t.request_stop(str(rank))) for rank in range(2)]
    assert agreed(*both).reason == "0"
    at_once = agreed(CallbackHook(after_step=lambda t: t.iter == 7 and t.stop("all")))
    assert (at_once.reason, at_once.iteration) == ("all", 8)


def check_requests_of_single_ranks_are_served_by_all_in_order(folder):
    seen = []

    def look(name):
        return lambda trainer: name in trainer.requests and seen.append([name, trainer.iter])

    listener = CallbackHook(**{f"on_{name}": look(name) for name in ("save", "write", "eval")})
    asks = [on_rank(1, 2, lambda t: t.request_eval()), on_rank(0, 2, lambda t: (t.request_save(), t.request_write()))]
    agreed(*asks, listener, steps=200)
    assert [event for event, _ in seen] == ["eval", "write", "save"]
    assert_same(seen)


def check_periods_in_seconds_end_at_the_same_step_on_all_ranks(folder):
    at, every = [], Every("0.1s")
    if comm.get_rank() == 1:
        time.sleep(0.06)

    def count(trainer):
        if every(trainer):
            at.append(trainer.iter)
        if len(at) == 2:
            trainer.stop("twice")

    agreed(CallbackHook(before_train=lambda t: every.start(), after_step=count))
    assert len(at) == 2
    assert_same(at)


def check_hooks_registered_on_all_ranks_join_with_the_next_step(folder):
    seen, late = [], CallbackHook(before_step=lambda t: seen.append(t.iter))
    agreed(CallbackHook(after_step=lambda t: t.iter == 5 and t.register_hooks([late])), steps=8)
    assert seen == [6, 7]


# ---------------------------------------------------------------------- losses


class NanBeside(nn.Module):
    """Has a loss that depends on no weight and becomes NaN on rank 1."""

    def __init__(self):
        super().__init__()
        self.linear, self.steps = nn.Linear(6, 3), 0

    def forward(self, batch):
        self.steps += 1
        nan = comm.get_rank() == 1 and self.steps == 5
        return {"loss": self.linear(batch[0]).square().mean(), "beside": torch.tensor(float("nan") if nan else 0.0)}


def check_a_nan_loss_without_gradient_stops_all_ranks_at_the_same_step(folder):
    result = trainer_of(DDP().wrap(NanBeside(), CPU), nonfinite="stop").train(0, 2000)
    assert result.reason.startswith("on rank 1 the loss is NaN or infinite at iteration 4")
    assert_same(result.iteration)


def check_a_nan_gradient_of_a_share_without_items_never_reaches_the_weights(folder):
    (x, y), sign = points(4).tensors, 1 if comm.is_main_process() else -1
    full, none = (x.abs(), y), (x.abs() * sign, y)
    ends = []
    for policy in ("raise", "skip", "stop"):
        wrapped = DDP().wrap(Items(least=0), CPU)
        trainer = trainer_of(wrapped, [full, full, none, full], nonfinite=policy)
        try:
            result = trainer.train(0, 4)
            ends.append((result.iteration, trainer.nonfinite.steps, "at iteration 2" in result.reason))
        except FloatingPointError as error:
            ends.append(str(error))
        assert all(bool(weight.isfinite().all()) for weight in wrapped.parameters())
    assert ends[0].startswith("on rank 0 the gradient of layer.weight and 1 others is NaN or infinite at iteration 2")
    assert ends[1:] == [(4, 1, False), (3, 1, True)]


def check_num_items_is_the_number_in_the_global_batch(folder):
    x, y = points(4).tensors
    x[:, 0] = torch.tensor([1.0, 1.0, 1.0, 1.0] if comm.is_main_process() else [1.0, 0.0, 1.0, 0.0])
    for steps in (1, 2):
        trainer = trainer_of(DDP().wrap(Items(), CPU), [(x, y)], accumulation_steps=steps)
        trainer.train(0, 1)
        assert trainer.storage.latest()["num_items"][0] == 6


class OwnStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x):
        return self.layer(x)

    def train_step(self, batch):
        return {"loss": self(batch).sum()}


def check_ranks_exchange_gradients_in_a_train_step_of_the_model(folder):
    model = DistributedDataParallel(OwnStep())
    for _ in range(2):  # the second call must find the module as it was
        model.zero_grad()
        ModelAdapter().losses(model, torch.full((1, 2), 1.0 + comm.get_rank()))["loss"].backward()
    assert model.module.layer.weight.grad.tolist() == [[1.5, 1.5]]


# ---------------------------------------------------------------------- what hooks see


class Recorder(EventWriter):
    def __init__(self):
        self.rows = []

    def write(self):
        storage = get_event_storage()
        self.rows.append((storage.iter, {name: value for name, (value, _) in storage.latest().items()}))


def check_writers_and_checkpointers_on_rank_0_only_work_as_in_detectron2(folder):
    wrapped, recorder = DistributedDataParallel(model()), Recorder()
    trainer = trainer_of(wrapped, adapter=LOSS)
    checkpointer = Checkpointer(wrapped, str(folder), trainer=trainer)
    mine = [hooks.IterationTimer()]
    if comm.is_main_process():
        mine += [hooks.PeriodicCheckpointer(checkpointer, 4), hooks.PeriodicWriter([recorder], period=2)]
    trainer.register_hooks(mine)
    trainer.train(0, 9)
    comm.synchronize()
    if not comm.is_main_process():
        assert recorder.rows == []
        return
    assert [iteration for iteration, _ in recorder.rows] == [1, 3, 5, 7, 8, 9]
    saved = sorted(path.name for path in folder.glob("*.pth"))
    assert saved == ["model_0000003.pth", "model_0000007.pth", "model_final.pth"]
    assert sorted(torch.load(folder / "model_final.pth", weights_only=True)["model"]) == ["bias", "weight"]


def check_each_rank_verifies_its_own_copy_of_a_checkpoint(folder):
    mine = folder / str(comm.get_rank())  # as on machines without a shared folder
    checkpointer = Checkpointer(model(), str(mine), save_to_disk=True)
    checkpointer.save("model_0000003", iteration=3)
    path = mine / "model_0000003.pth"
    content, weight = path.read_bytes(), model().weight.detach().numpy().tobytes()
    assert checkpointer.resume_or_load("")["iteration"] == 3
    if comm.get_rank() == 1:
        path.write_bytes(content.replace(weight, bytes(len(weight))))
        with pytest.raises(ConfigError, match=r"1/model_0000003.pth is corrupt: the checksum of .* is wrong"):
            checkpointer.resume_or_load("")
    else:
        checkpointer.resume_or_load("")


def check_hooks_of_all_ranks_see_values_over_ranks(folder):
    trainer, recorder, own = trainer_of(DDP().wrap(model(), CPU), adapter=LOSS), Recorder(), []

    def put(trainer):
        rank, storage = comm.get_rank(), trainer.storage
        for how in ("mean", "sum", "max", "min"):
            storage.put_scalar(f"own/{how}", trainer.iter + rank, over_ranks=how)
        if rank == 0 or trainer.iter % 2:  # rank 1 puts none in even iterations
            storage.put_scalar("own/some", 10.0 * rank, over_ranks="mean")

    mine = CallbackHook(before_backward=lambda t, losses: own.append(losses.item()), after_step=put)
    trainer.register_hooks([mine, hooks.IterationTimer(warmup_iter=0), hooks.PeriodicWriter([recorder], period=2)])
    trainer.train(0, 7)
    first, second = comm.all_gather(own)
    assert first != second
    shown = [value for value, _ in trainer.storage.history("total_loss").values()]
    assert shown == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert_same(shown)
    histories = trainer.storage.histories("own/")
    # The values of the ranks are the iteration, and one more.
    expected = {"mean": [i + 0.5 for i in range(7)], "sum": [2 * i + 1 for i in range(7)], "max": list(range(1, 8))}
    for how, values in (expected | {"min": list(range(7))}).items():
        assert [value for value, _ in histories[f"own/{how}"].values()] == values
        assert Monitor(f"own/{how}").value(trainer)[0] == values[-1]
    if comm.is_main_process():
        assert [value for value, _ in histories["own/some"].values()] == [0, 5, 0, 5, 0, 5, 0]
    assert [name for name in recorder.rows[0][1] if "rank" in name] == ["slowest_rank"]


# ---------------------------------------------------------------------- weights


def check_before_evaluation_copies_the_buffers_of_rank_0(folder):
    for strategy in (DDP(), FSDP2(min_params=1)):
        torch.manual_seed(comm.get_rank())
        norm = nn.BatchNorm1d(3)
        wrapped = strategy.wrap(norm, CPU)
        wrapped(torch.randn(4, 3))
        first, second = comm.all_gather(norm.running_mean.tolist())
        assert first != second
        strategy.before_evaluation(wrapped)
        assert norm.running_mean.tolist() == first


def check_weights_or_rates_that_one_rank_changes_alone_are_an_error_before_a_save(folder):
    def train(do, period=0, strategy=None, when=5, evaluate=None):
        strategy = strategy or DDP()
        wrapped = strategy.wrap(model(), CPU)
        if isinstance(strategy, DDP):
            wrapped.module.frozen = nn.Parameter(torch.full((2,), float(comm.get_rank())), requires_grad=False)
        trainer = trainer_of(wrapped, adapter=LOSS, strategy=strategy)
        saves = [hooks.PeriodicCheckpointer(Checkpointer(wrapped, str(folder)), period)] if period else []
        evaluations = [hooks.EvalHook(4, evaluate)] if evaluate else []
        trainer.register_hooks([on_rank(1, when, do), *saves, *evaluations])
        return trainer.train(0, 12).reason

    def set_rate(trainer):
        trainer.optimizer.param_groups[0]["lr"] = 0.5

    def add(value):
        @torch.no_grad()
        def change(trainer):
            trainer.model.module.weight[1, 0] += value

        return change

    for do, period, iteration in ((add(0.5), 4, 7), (add(0.5), 0, 11)):
        with pytest.raises(RuntimeError, match=f"drifted apart: after iteration {iteration} rank 1 has another"):
            train(do, period)
    for strategy, when in ((DDP(), 5), (FSDP2(), 5), (FSDP2(), 11)):  # between two exchanges, and after the last
        with pytest.raises(RuntimeError, match=r"the learning rates differ by rank .* \(rank 1 has \[0.5\], rank 0 \["):
            train(set_rate, strategy=strategy, when=when)
    evaluated = []
    with pytest.raises(RuntimeError, match="drifted apart: after iteration 7 rank 1 has another"):
        train(add(0.5), evaluate=lambda: evaluated.append(1))
    assert len(evaluated) == 1  # before the change
    assert train(add(1e-6), 4) == "completed"  # frozen weights and rounding may differ
    with torch.no_grad():
        copies = Mesh(replicate=2, shard=1, param_dtype="bfloat16").wrap(model(), CPU)
        check_same_weights(DDP(), copies, 0)
        copies.bias.to_local()[0] += comm.get_rank()
        with pytest.raises(RuntimeError, match="rank 1 has another bias"):
            check_same_weights(DDP(), copies, 0)


def check_a_rank_that_builds_another_model_is_named_with_the_parameter(folder):
    with pytest.raises(ConfigError, match=r"rank 1 has built another model than rank 0: 1\.weight is \(3, 4\)"):
        FSDP2().wrap(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2 + comm.get_rank())), CPU)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


def check_the_error_of_parameters_without_gradient_has_keys_that_help(folder):
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert trainer_of(DDP(**options).wrap(Halves(), CPU), adapter=LOSS).train(0, 3).reason == "completed"
    with pytest.raises(RuntimeError, match=r"(?s)PARALLEL\.ARGS\.find_unused_parameters.* rank \d: 2 3"):
        trainer_of(DDP().wrap(Halves(), CPU), adapter=LOSS).train(0, 3)


# ---------------------------------------------------------------------- one rank alone


def alone(folder):
    class Alone(Steps):
        def run_step(self):
            if self.iter == 5 and comm.get_rank() == 1:
                raise StopTraining("in the step")
            super().run_step()

    rank_sync._WAIT = 1.0
    Alone().train(0, 100000)
