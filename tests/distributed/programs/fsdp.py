"""FSDP2 compared with a whole model that each rank trains by itself."""

import logging

import torch
from results import write_result
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer, comm
from hookline.engine.data import ArrayDataset, EpochSampler, GlobalBatchSampler
from hookline.engine.modeling import GPT, MODEL_REGISTRY, ModelAdapter, build_model
from hookline.engine.parallel import Strategy, recording
from hookline.engine.parallel.deferred_init import build_wrapped
from hookline.engine.parallel.fsdp import FSDP2
from hookline.engine.solver import build_optimizer
from hookline.hooks.common.tensors import is_sharded


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
    ahead, _ = units(modules=["TransformerBlock"], forward_prefetch=2, backward_prefetch=1)
    result["ahead"] = [
        [len(getattr(module._get_fsdp_state(), f"_states_to_{when}_prefetch")) for when in ("forward", "backward")]
        for module in (ahead, *ahead.blocks)
    ]
    by_class(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    ahead(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    pairs = zip(ahead.parameters(), by_class.parameters(), strict=True)
    result["same gradients"] = all(torch.equal(one.grad.to_local(), other.grad.to_local()) for one, other in pairs)
    try:
        units(modules=["TransformerBlok"])
    except ConfigError as error:
        result["error"] = str(error)
    write_result(folder, {**result, **deferred()})


class Peeking(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.address = self.weight.data_ptr()


def deferred():
    """Models that are built shard by shard, compared with rank 0's whole ones. Each rank has its own seed."""
    keep, logger = Keep(), logging.getLogger("hookline.engine.parallel.deferred_init")
    logger.addHandler(keep)
    recording.SMALL = 100
    found = {}
    for make, modules in ((small_gpt, ["TransformerBlock"]), (Tied, []), (Normed, ["Conv2d"]), (Peeking, [])):
        torch.manual_seed(comm.get_rank())
        whole = make()
        state = torch.get_rng_state()
        expected = comm.broadcast_object(whole.state_dict())
        torch.manual_seed(comm.get_rank())
        model = build_wrapped(make, FSDP2(modules=modules, min_params=20), torch.device("cpu"))
        values = {
            name: value.full_tensor() if is_sharded(value) else value for name, value in model.state_dict().items()
        }
        equal = values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in values)
        found[make.__name__] = equal and torch.equal(torch.get_rng_state(), state)
        found["still tied"] = found.get("still tied") or (make is Tied and model.encoder.weight is model.middle.weight)
    return {"deferred": found, "warnings": keep.messages}


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
