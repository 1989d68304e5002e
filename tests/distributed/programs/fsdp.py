"""FSDP2 compared with a whole model that each rank trains by itself."""

import logging
from itertools import pairwise

import torch
from results import write_result
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
from hookline.hooks.common.tensors import gathered


def units(**options):
    torch.manual_seed(comm.get_rank())  # each rank has different weights
    model = FSDP2(**options).wrap(GPT(width=32, depth=2, heads=2, block_size=16), torch.device("cpu"))
    return model, [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def chosen_units(folder):
    by_class, names = units(modules=["TransformerBlock"])
    result = {"class": names, "name": units(modules=["blocks.1"])[1], "size": units(min_params=12_000)[1]}
    whole = {name: weight.full_tensor().sum().item() for name, weight in by_class.named_parameters()}
    result["equal"] = whole == comm.broadcast_object(whole)
    dtypes, _ = units(modules=["TransformerBlock"], param_dtype="bfloat16", reduce_dtype="float32")
    scores = dtypes(torch.zeros(2, 4, dtype=torch.int64))
    scores.float().sum().backward()
    result["dtypes"] = [str(scores.dtype), str(dtypes.head.weight.dtype), str(dtypes.head.weight.grad.dtype)]
    try:
        units(modules=["TransformerBlok"])
    except ConfigError as error:
        result["error"] = str(error)
    write_result(folder, {**result, **deferred()})


def deferred():
    """Sharded models compared with rank 0's whole ones. Each rank has its own seed."""
    found = {}
    for make, modules in ((small_gpt, ["TransformerBlock"]), (Tied, []), (Normed, ["Conv2d"])):
        torch.manual_seed(comm.get_rank())
        whole = make()
        state = torch.get_rng_state()
        torch.manual_seed(comm.get_rank())
        model = build_wrapped(make, FSDP2(modules=modules, min_params=20), torch.device("cpu"))
        found[make.__name__] = same(model, whole) and torch.equal(torch.get_rng_state(), state)
        found["still tied"] = found.get("still tied") or (make is Tied and model.encoder.weight is model.middle.weight)
    return {"deferred": found, "meta": on_meta()}


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


def on_meta():
    """Models that are built on the meta device."""

    def make():
        return nn.Sequential(Tied(), Angles(), nn.BatchNorm1d(6), GPT(width=32, depth=2, heads=2, tie_weights=True))

    found, models = {}, []
    cpu = torch.device("cpu")
    plan = {"3.blocks.*.mlp": "colwise", "3.blocks.*.mlp_proj": "rowwise", "3.tokens": "rowwise"}
    split = {"tensor": 2, "plan": {**plan, "3.head": "colwise->replicate"}}
    sharded, copied, split = (
        FSDP2(init="meta"),
        Mesh(replicate=2, shard=1, init="meta"),
        Mesh(shard=1, **split, init="meta"),
    )
    for strategy in (sharded, copied, split):
        torch.manual_seed(comm.get_rank())
        state = torch.get_rng_state()
        models.append(build_wrapped(make, strategy, cpu))
        found["generators are left"] = torch.equal(torch.get_rng_state(), state)
    values = [{name: gathered(value) for name, value in model.state_dict().items()} for model in models]
    found["same on every mesh"] = all(same(one, other) for one, other in pairwise(models))
    found["same on all ranks"] = all(same(model, model) for model in models)
    found["tied"] = all(
        tied.encoder.weight is tied.middle.weight and gpt.head.weight is gpt.tokens.weight for tied, _, _, gpt in models
    )
    found["angles"] = models[0][1].angles.tolist()
    std = {name: value.std().item() for name, value in values[0].items() if value.dim() == 2 and name.startswith("3")}
    found["std"] = {name.removeprefix("3."): round(value, 3) for name, value in std.items()}
    for cls in (Forgets, Peeks, nn.MultiheadAttention):
        try:
            build_wrapped(lambda cls=cls: nn.Sequential(cls(6, 2) if "Multi" in cls.__name__ else cls()), sharded, cpu)
        except ConfigError as error:
            found[cls.__name__] = str(error)
    return found


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
    model = strategy.wrap(make(), torch.device("cpu"))
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


def optimizers(folder, *names):
    logging.disable(logging.CRITICAL)
    found = {}
    for name in names:
        options = {"make": matrix, "adapter": SQUARES} if name == "torch.optim:Muon" else {"make": plain}
        try:
            _, found[name] = compare(cfg=config(name), **options)
        except ConfigError as error:
            found[name] = str(error)
    _, found["momentum"] = compare(plain, config("SGD", foreach=True))
    try:
        compare(plain, config("SGD", fused=True))
    except ConfigError as error:
        found["fused"] = str(error)
    write_result(folder, found)


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


def models(folder):
    keep, logger = Keep(), logging.getLogger("hookline.engine.parallel.fsdp")
    logger.addHandler(keep)
    found = {}
    for name, make, adapter in (("accumulated", plain, LOSS), ("items accumulated", Items, ModelAdapter())):
        _, found[name] = compare(make, config(), adapter=adapter, strategy={"min_params": 10}, accumulation_steps=4)
    for modules in ([], ["Linear"]):
        model, found[f"tied {modules}"] = compare(Tied, config(), strategy={"modules": modules})
        found["is tied"] = model.encoder.weight is model.middle.weight
    x = torch.randn(11, 2, 8, 8, generator=generator)
    _, found["channels last"] = compare(images, config(), data=ArrayDataset(x, DATA.tensors[1]))
    found["logged"] = keep.messages
    for name, reshard in (("root", True), ("all", False)):
        model = FSDP2(min_params=20, reshard_after_forward=reshard).wrap(plain(), torch.device("cpu"))
        with torch.no_grad():
            model(DATA.tensors[0])
            for parameter in model.parameters():
                parameter.to_local().zero_()
            found[f"stale, {name}"] = model(DATA.tensors[0]).abs().max().item()
    write_result(folder, found)
