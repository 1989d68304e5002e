"""Models trained by two ranks, compared with a whole model that each rank trains by itself."""

import contextlib
import copy
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from parts import CPU, LOSS, Items, plain, points
from small_runs import Gan
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer, comm
from hookline.engine.data import ArrayDataset, EpochSampler, GlobalBatchSampler
from hookline.engine.modeling import GPT, MODEL_REGISTRY, ModelAdapter, build_model
from hookline.engine.modeling.build import attached_to
from hookline.engine.parallel import DDP, FSDP2, Mesh, Strategy, fsdp
from hookline.engine.parallel.base import build_wrapped
from hookline.engine.solver import build_optimizer
from hookline.engine.solver.clipping import build_grad_clipper
from hookline.hooks.common import gathered, unwrap_model


def config(optimizer="SGD", **args):
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.SOLVER.BASE_LR = "cpu", 0.05
    cfg.merge_from_list(["SOLVER.OPTIMIZER.NAME", optimizer, "SOLVER.OPTIMIZER.ARGS", args])
    return cfg


DATA = points(37)  # the last batch of an epoch has 5 of 8 samples


def train(make, strategy, rank, ranks, cfg, adapter=LOSS, data=DATA, clip=None, **options):
    """Return the model, the logged losses and the whole weights."""
    torch.manual_seed(7)
    model = strategy.wrap(make(), CPU)
    batches = GlobalBatchSampler(EpochSampler(len(data), seed=1), 8, rank=rank, world_size=ranks)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate_fn)
    adapter = copy.deepcopy(adapter)
    with attached_to(unwrap_model(model), adapter.loss):
        optimizer = build_optimizer(cfg, unwrap_model(model))
    options |= {"adapter": adapter, "strategy": strategy, "clip_gradients": clip}
    trainer = SimpleTrainer(model, loader, optimizer, **options)
    trainer.train(0, 6)
    losses = torch.tensor([value for value, _ in trainer.storage.history("total_loss").values()])
    trained = [*model.parameters(), *(adapter.loss.parameters() if isinstance(adapter.loss, nn.Module) else ())]
    return model, losses, [gathered(parameter).detach() for parameter in trained]


def compare(make, cfg=None, strategy=None, **options):
    """Return the model of two ranks, and the largest difference of a loss or weight from those of the whole model."""
    cfg, strategy = cfg or config(), strategy or FSDP2(min_params=20)
    model, *ours = train(make, strategy, comm.get_rank(), 2, cfg, **options)
    _, *theirs = train(make, Strategy(), 0, 1, cfg, **options)
    pairs = zip([ours[0], *ours[1]], [theirs[0], *theirs[1]], strict=True)
    return model, max((our - their).abs().max().item() for our, their in pairs)


# ---------------------------------------------------------------------- losses and weights


class Tempered(nn.Module):
    """A loss with a learned temperature, and a parameter that it does not use."""

    def __init__(self):
        super().__init__()
        self.temperature, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

    def forward(self, scores, y):
        return nn.functional.cross_entropy(scores / self.temperature, y)


class Counting(DDP):
    """Counts the exchanges of gradients."""

    exchanges = 0

    def wrap(self, model, device):
        def count(state, bucket):
            self.exchanges += 1
            return default_hooks.allreduce_hook(state, bucket)

        wrapped = super().wrap(model, device)
        wrapped.register_comm_hook(None, count)
        return wrapped


def check_two_ranks_have_the_losses_and_weights_of_one(folder):
    def clip(parameters):
        return nn.utils.clip_grad_norm_(parameters, 0.1)

    strategies = (DDP, partial(FSDP2, min_params=10))
    # In the last batch of an epoch, a rank's share has fewer samples than 4.
    for strategy, make, steps in product(strategies, (plain, Items), (1, 4)):
        adapter = ModelAdapter() if make is Items else LOSS
        options = {"adapter": adapter, "strategy": strategy(), "accumulation_steps": steps}
        assert compare(make, config(momentum=0.9), **options)[1] < 1e-5, (strategy, make, steps)
    for strategy in (DDP(), FSDP2(min_params=10)):
        options = {"adapter": ModelAdapter(Tempered()), "strategy": strategy, "accumulation_steps": 2, "clip": clip}
        assert compare(plain, config("AdamW"), **options)[1] < 1e-5, strategy
    assert compare(plain, strategy=DDP(static_graph=True), clip=clip, accumulation_steps=4)[1] < 1e-5
    counting = Counting()
    assert compare(plain, strategy=counting, accumulation_steps=2)[1] < 1e-5
    assert counting.exchanges == 6  # one for each update
    assert 1e-6 < compare(plain, strategy=DDP(compression="bf16"))[1] < 2e-2


def check_class_weights_and_ignored_labels_count_as_in_one_process(folder):
    x, y = DATA.tensors
    data = ArrayDataset(x, torch.where(torch.arange(len(y)) % 5 == 0, y, -100))  # a rank may have no label in a batch
    losses = nn.CrossEntropyLoss(torch.tensor([1.0, 9.0, 2.0])), nn.CrossEntropyLoss(reduction="sum")
    for loss, steps in product(losses, (1, 3)):
        options = {"adapter": ModelAdapter(loss), "data": data, "accumulation_steps": steps}
        assert compare(plain, strategy=DDP(), **options)[1] < 1e-5, (loss, steps)


def check_optimizers_that_take_turns_train_as_in_one_process(folder):
    cfg = config("Adam")
    cfg.merge_from_list(["SOLVER.OPTIMIZERS.critic", {"PARAMS": "critic"}, "SOLVER.OPTIMIZERS.generator", {}])
    for strategy in (FSDP2(min_params=1), DDP(find_unused_parameters=True)):
        assert compare(partial(Gan, 6), cfg, strategy, adapter=ModelAdapter())[1] < 1e-5, strategy


# Muon takes matrices only. Its update is ill-conditioned if the gradient has not full rank, as with cross-entropy.
def matrix():
    return nn.Linear(6, 3, bias=False)


SQUARES = ModelAdapter(lambda scores, y: (scores - nn.functional.one_hot(y, 3)).square().mean())


def check_each_optimizer_updates_shards_like_whole_weights_or_is_refused(folder):
    for name, cls in vars(torch.optim).items():
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or name in ("Optimizer", "LBFGS"):
            continue
        options = {"make": matrix, "adapter": SQUARES} if name == "Muon" else {"make": plain}
        options["data"] = points(11)
        if name == "Adafactor":
            with pytest.raises(ConfigError, match="Adafactor cannot update parameters that are sharded"):
                compare(cfg=config(f"torch.optim:{name}"), **options)
        elif name in ("Rprop", "SparseAdam"):  # torch 2.13 cannot step these over shards; 2.15 steps Rprop
            with contextlib.suppress(NotImplementedError, RuntimeError):
                assert compare(cfg=config(f"torch.optim:{name}"), **options)[1] < 1e-4, name
        else:  # Muon computes in bfloat16
            assert compare(cfg=config(f"torch.optim:{name}"), **options)[1] < (1e-3 if name == "Muon" else 1e-4), name
    assert compare(plain, config("SGD", foreach=True))[1] < 1e-4
    with pytest.raises(Exception, match=r"\w"):  # of torch: a fused step cannot update shards
        compare(plain, config("SGD", fused=True))


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = plain()

    def forward(self, x):
        return self.net(x) + sum(parameter.square().sum() for parameter in self.parameters())


def check_a_penalty_on_shards_is_one_line_that_says_what_to_do(folder):
    with pytest.raises(ConfigError, match=r"PARALLEL\.ARGS\.min_params"):
        compare(Penalized)
    assert compare(Penalized, strategy=FSDP2(min_params=10**6))[1] < 1e-4


def check_gradients_are_clipped_as_those_of_the_whole_model(folder):
    cfg, batch = get_cfg(), DATA.tensors[0][:4]
    tensor = Mesh(shard=1, tensor=2, plan={"0": "colwise", "2": "rowwise"})
    limits = {"norm": 1e-3, "param_norm": 1e-3, "value": 1e-4}
    for strategy, kind, norm_type in product((FSDP2(min_params=1), tensor), limits, (2.0, float("inf"))):
        clip = {"ENABLED": True, "CLIP_TYPE": kind, "CLIP_VALUE": limits[kind], "NORM_TYPE": norm_type}
        cfg.merge_from_list(["SOLVER.CLIP_GRADIENTS", clip])
        clip, models = build_grad_clipper(cfg), []
        for wrap in (strategy.wrap, Strategy().wrap):
            torch.manual_seed(0)
            models.append(wrap(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), CPU))
            models[-1](batch).square().sum().backward()
        shared, alone = models
        expected, found = clip(list(alone.parameters())), strategy.clip(clip, list(shared.parameters()))
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)
        for ours, theirs in zip(shared.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


# ---------------------------------------------------------------------- units


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.encoder, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle.weight = self.encoder.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.encoder(torch.tanh(self.first(x)))))))


@MODEL_REGISTRY.register()
class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))


def images():
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.NAME", "Images", "MODEL.CHANNELS_LAST", True, "MODEL.DEVICE", "cpu"])
    return build_model(cfg)


def check_tied_and_channels_last_weights_train_as_in_one_process_with_a_warning(folder):
    seen, fsdp.logger.warning = [], lambda text, *words: seen.append(text % words)
    for modules in ([], ["Linear"]):
        model, difference = compare(Tied, strategy=FSDP2(min_params=20, modules=modules))
        assert model.encoder.weight is model.middle.weight
        assert difference < 1e-5
    x = torch.randn(11, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert compare(images, data=ArrayDataset(x, points(11).tensors[1]))[1] < 1e-5
    assert "encoder is no unit: it shares a parameter" in str(seen)
    assert str(seen).count("MODEL.CHANNELS_LAST has no effect") == 1


def small_gpt():
    return GPT(width=32, depth=2, heads=2, block_size=16)


def check_units_are_chosen_by_class_name_or_size(folder):
    def units(**options):
        model = FSDP2(**options).wrap(small_gpt(), CPU)
        return model, [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    for options in ({"modules": ["TransformerBlock"]}, {"min_params": 12_000}):
        assert units(**options)[1] == ["", "blocks.0", "blocks.1"]
    assert units(modules=["blocks.1"])[1] == ["", "blocks.1"]
    with pytest.raises(ConfigError, match="did you mean 'TransformerBlock'"):
        units(modules=["TransformerBlok"])
    low, _ = units(modules=["TransformerBlock"], param_dtype="bfloat16", reduce_dtype="float32")
    scores = low(torch.zeros(2, 4, dtype=torch.int64))
    scores.float().sum().backward()
    assert [scores.dtype, low.head.weight.dtype, low.head.weight.grad.dtype] == [torch.bfloat16, *[torch.float32] * 2]


def check_a_forward_pass_after_an_evaluation_uses_the_present_weights(folder):
    for reshard in (True, False):
        model = FSDP2(min_params=20, reshard_after_forward=reshard).wrap(plain(), CPU)
        with torch.no_grad():
            model(DATA.tensors[0])
            for parameter in model.parameters():
                parameter.to_local().zero_()
            assert model(DATA.tensors[0]).abs().max() == 0


# ---------------------------------------------------------------------- the first weights


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(8), nn.Flatten())
        self.register_buffer("angles", torch.rand(50), persistent=False)
        self.register_buffer("table", torch.rand(50))


def same(model, whole):
    """Whether a sharded model has the values of rank 0's whole one, buffers that are not saved included."""
    ours, theirs = (
        {name: gathered(value) for name, value in [*one.named_parameters(), *one.named_buffers()]}
        for one in (model, whole)
    )
    theirs = comm.broadcast_object(theirs)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def check_sharded_models_start_with_the_weights_of_rank_0(folder):
    for make, modules in ((small_gpt, ["TransformerBlock"]), (Tied, []), (Normed, ["Conv2d"])):
        torch.manual_seed(comm.get_rank())
        whole = make()
        state = torch.get_rng_state()
        torch.manual_seed(comm.get_rank())
        model = build_wrapped(make, FSDP2(modules=modules, min_params=20), CPU)
        assert same(model, whole), make
        assert torch.equal(torch.get_rng_state(), state)
        assert make is not Tied or model.encoder.weight is model.middle.weight


class Angles(nn.Module):
    """Has a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(6))
        self.register_buffer("angles", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        self.angles = torch.arange(6.0)


class Forgets(Angles):
    def reset_parameters(self):
        nn.init.ones_(self.scale)


class ForgetsNumbers(Angles):
    def __init__(self):
        super().__init__()
        self.register_buffer("numbers", torch.arange(3))


class Peeks(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.first = self.weight[0, 0].item()


def check_models_built_on_the_meta_device_are_the_same_on_every_mesh(folder):
    def make():
        return nn.Sequential(Tied(), Angles(), nn.BatchNorm1d(6), GPT(width=32, depth=2, heads=2, tie_weights=True))

    plan = {"3.blocks.*.mlp": "colwise", "3.blocks.*.mlp_proj": "rowwise", "3.tokens": "rowwise"}
    plan["3.head"] = "colwise->replicate"
    sharded, models = FSDP2(init="meta"), []
    tensor = Mesh(shard=1, tensor=2, plan=plan, init="meta")
    for strategy in (sharded, Mesh(replicate=2, shard=1, init="meta"), tensor):
        torch.manual_seed(comm.get_rank())
        state = torch.get_rng_state()
        tied, angles, _, gpt = model = build_wrapped(make, strategy, CPU)
        assert torch.equal(torch.get_rng_state(), state)
        assert tied.encoder.weight is tied.middle.weight
        assert gpt.head.weight is gpt.tokens.weight
        assert angles.angles.tolist() == [0, 1, 2, 3, 4, 5]
        assert same(model, model)
        models.append(model)
    assert all(same(one, other) for one, other in pairwise(models))
    for name, value in models[0][3].state_dict().items():
        if value.dim() == 2:
            assert round(gathered(value).std().item(), 2) == (0.01 if "proj" in name else 0.02), name
    for make, message in (
        (Forgets, r"reset_parameters\(\) of 0 \(Forgets\) leaves angles"),
        (ForgetsNumbers, r"reset_parameters\(\) of 0 \(ForgetsNumbers\) leaves numbers"),
        (Peeks, "cannot be built on torch's meta device"),
        (lambda: nn.MultiheadAttention(6, 2), r"0 \(MultiheadAttention\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_wrapped(lambda make=make: nn.Sequential(make()), sharded, CPU)
