"""FSDP2 compared with a whole model that each rank trains by itself."""

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer, comm
from hookline.engine.data import ArrayDataset, EpochSampler, GlobalBatchSampler
from hookline.engine.modeling import GPT, MODEL_REGISTRY, ModelAdapter, build_model
from hookline.engine.parallel import Strategy
from hookline.engine.parallel.base import build_wrapped
from hookline.engine.parallel.fsdp import FSDP2
from hookline.engine.parallel.mesh import Mesh
from hookline.engine.solver import build_optimizer
from hookline.hooks.common import gathered

CPU = torch.device("cpu")


def units(**options):
    torch.manual_seed(comm.get_rank())  # each rank has different weights
    model = FSDP2(**options).wrap(GPT(width=32, depth=2, heads=2, block_size=16), CPU)
    return model, [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def check_units_are_chosen_by_class_name_or_size_and_ranks_start_with_equal_weights(folder):
    by_class, names = units(modules=["TransformerBlock"])
    assert names == units(min_params=12_000)[1] == ["", "blocks.0", "blocks.1"]
    assert units(modules=["blocks.1"])[1] == ["", "blocks.1"]
    whole = {name: weight.full_tensor().sum().item() for name, weight in by_class.named_parameters()}
    assert whole == comm.broadcast_object(whole)
    with pytest.raises(ConfigError, match="did you mean 'TransformerBlock'"):
        units(modules=["TransformerBlok"])
    low, _ = units(modules=["TransformerBlock"], param_dtype="bfloat16", reduce_dtype="float32")
    scores = low(torch.zeros(2, 4, dtype=torch.int64))
    scores.float().sum().backward()
    assert [scores.dtype, low.head.weight.dtype, low.head.weight.grad.dtype] == [torch.bfloat16, *[torch.float32] * 2]


def same(model, whole):
    """Whether a sharded model has the values of rank 0's whole one, buffers that are not saved included."""
    ours, theirs = (
        {name: gathered(value) for name, value in [*one.named_parameters(), *one.named_buffers()]}
        for one in (model, whole)
    )
    theirs = comm.broadcast_object(theirs)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


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


class Peeks(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.first = self.weight[0, 0].item()


def small_gpt():
    return GPT(width=32, depth=2, heads=2, block_size=16)


generator = torch.Generator().manual_seed(0)
DATA = ArrayDataset(torch.randn(11, 6, generator=generator), torch.randint(3, (11,), generator=generator))
LOSS = ModelAdapter(nn.CrossEntropyLoss())


class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, batch):
        mask = batch[0][:, 0] > -0.5
        losses = nn.functional.cross_entropy(self.layer(batch[0]), batch[1], reduction="none")
        return {"loss": (losses * mask).sum() / mask.sum().clamp(min=1), "num_items": mask.sum()}


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(8), nn.Flatten())
        self.register_buffer("angles", torch.rand(50), persistent=False)
        self.register_buffer("table", torch.rand(50))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.encoder, self.middle = nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle.weight = self.encoder.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.encoder(torch.tanh(self.first(x)))))))


def plain():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


# Muon takes matrices only. Its update is ill-conditioned if the gradient has not full rank, as with cross-entropy.
def matrix():
    return nn.Linear(6, 3, bias=False)


SQUARES = ModelAdapter(lambda scores, y: (scores - nn.functional.one_hot(y, 3)).square().mean())


def config(optimizer="SGD", **args):
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.SOLVER.BASE_LR = "cpu", 0.05
    cfg.merge_from_list(["SOLVER.OPTIMIZER.NAME", optimizer, "SOLVER.OPTIMIZER.ARGS", args])
    return cfg


def weights(make, strategy, rank, world_size, cfg, adapter=LOSS, data=DATA, **options):
    torch.manual_seed(7)
    model = strategy.wrap(make(), CPU)
    batches = GlobalBatchSampler(EpochSampler(len(data), seed=1), 8, rank=rank, world_size=world_size)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=data.collate_fn)
    optimizer = build_optimizer(cfg, model)
    SimpleTrainer(model, loader, optimizer, adapter=adapter, strategy=strategy, **options).train(0, 6)
    return model, [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def compare(make, cfg, **options):
    """The sharded model, and the largest difference of a weight from the whole model's."""
    args = {"min_params": 20, **options.pop("strategy", {})}
    model, ours = weights(make, FSDP2(**args), comm.get_rank(), 2, cfg, **options)
    _, theirs = weights(make, Strategy(), 0, 1, cfg, **options)
    assert all(hasattr(p, "to_local") for p in model.parameters())
    return model, max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


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


def check_models_built_on_the_meta_device_are_the_same_on_every_mesh(folder):
    def make():
        return nn.Sequential(Tied(), Angles(), nn.BatchNorm1d(6), GPT(width=32, depth=2, heads=2, tie_weights=True))

    plan = {"3.blocks.*.mlp": "colwise", "3.blocks.*.mlp_proj": "rowwise", "3.tokens": "rowwise"}
    plan["3.head"] = "colwise->replicate"
    sharded, models = FSDP2(init="meta"), []
    for strategy in (
        sharded,
        Mesh(replicate=2, shard=1, init="meta"),
        Mesh(shard=1, tensor=2, plan=plan, init="meta"),
    ):
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
        (Forgets, r"reset_parameters\(\) of 0 \(Forgets\) leaves angles without values"),
        (Peeks, "cannot be built on torch's meta device"),
        (lambda: nn.MultiheadAttention(6, 2), r"0 \(MultiheadAttention\) has parameters .* no method"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_wrapped(lambda make=make: nn.Sequential(make()), sharded, CPU)


def check_each_optimizer_updates_shards_like_whole_weights_or_is_refused(folder):
    for name, cls in vars(torch.optim).items():
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)) or name in ("Optimizer", "LBFGS"):
            continue
        options = {"make": matrix, "adapter": SQUARES} if name == "Muon" else {"make": plain}
        if name in ("Adafactor", "Rprop", "SparseAdam"):  # torch 2.13 cannot step these over shards
            with pytest.raises(Exception, match=r"\w"):
                compare(cfg=config(f"torch.optim:{name}"), **options)
        else:  # Muon computes in bfloat16
            assert compare(cfg=config(f"torch.optim:{name}"), **options)[1] < (1e-3 if name == "Muon" else 1e-4), name
    assert compare(plain, config("SGD", foreach=True))[1] < 1e-4
    with pytest.raises(Exception, match=r"\w"):  # of torch: a fused step cannot update shards
        compare(plain, config("SGD", fused=True))


class Keep(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@MODEL_REGISTRY.register()
class Images(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))


def images():
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.NAME", "Images", "MODEL.CHANNELS_LAST", True, "MODEL.DEVICE", "cpu"])
    return build_model(cfg)


def check_a_share_smaller_than_the_number_of_micro_batches_does_not_deadlock(folder):
    for make, adapter in ((plain, LOSS), (Items, ModelAdapter())):
        options = {"adapter": adapter, "strategy": {"min_params": 10}, "accumulation_steps": 4}
        assert compare(make, config(), **options)[1] < 1e-5


def check_tied_and_channels_last_weights_train_as_in_one_process_with_a_warning(folder):
    keep, logger = Keep(), logging.getLogger("hookline.engine.parallel.fsdp")
    logging.disable(logging.NOTSET)
    logger.addHandler(keep)
    for modules in ([], ["Linear"]):
        model, difference = compare(Tied, config(), strategy={"modules": modules})
        assert model.encoder.weight is model.middle.weight
        assert difference < 1e-5
    x = torch.randn(11, 2, 8, 8, generator=generator)
    assert compare(images, config(), data=ArrayDataset(x, DATA.tensors[1]))[1] < 1e-5
    logging.disable(logging.WARNING)
    assert any("encoder is no unit: it shares a parameter" in text for text in keep.messages)
    assert sum("MODEL.CHANNELS_LAST has no effect" in text for text in keep.messages) == 1


def check_a_forward_pass_after_an_evaluation_uses_the_present_weights(folder):
    for reshard in (True, False):
        model = FSDP2(min_params=20, reshard_after_forward=reshard).wrap(plain(), CPU)
        with torch.no_grad():
            model(DATA.tensors[0])
            for parameter in model.parameters():
                parameter.to_local().zero_()
            assert model(DATA.tensors[0]).abs().max() == 0
