"""Runs with ``PARALLEL.NAME: "mesh"``: each combination of dimensions with each feature, and resumed in each other."""

import logging
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hookline.config import ConfigError, get_cfg
from hookline.engine import DefaultTrainer, comm
from hookline.engine.data import ArrayDataset
from hookline.engine.evaluation import write_predictions
from hookline.engine.parallel import Mesh, Strategy, mesh


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        # Without a bias of keys: its gradient is 0 up to rounding, which AdamW would turn into steps.
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.proj = nn.Linear(16, 16)

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = (part(x).view(n, length, -1, 4).transpose(1, 2) for part in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(n, length, -1))


class Net(nn.Module):
    """A small transformer."""

    def __init__(self, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(12, 16)
        self.norm1, self.attention = nn.LayerNorm(16), Attention()
        self.norm2, self.mlp, self.mlp_proj = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 12, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def tensor_parallel_plan(self):
        return {
            "tokens": "rowwise",
            "attention.[qkv]": "colwise",
            "attention.proj": "rowwise",
            "mlp": "colwise",
            "mlp_proj": "rowwise",
            "head": "colwise->replicate",
        }

    def forward(self, tokens):
        x = self.tokens(tokens)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp_proj(F.gelu(self.mlp(self.norm2(x))))
        return self.head(x).transpose(1, 2).contiguous()


def data(seed, size):
    """Texts of 8 tokens. The numbers of targets are not the same on all ranks."""
    tokens = torch.randint(12, (size, 9), generator=torch.Generator().manual_seed(seed))
    return ArrayDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].where(tokens[:, 1:] > 2, -100).contiguous())


def train():
    return data(0, 44)


def test():
    return data(1, 13)


BASE = [
    "MODEL.NAME", "meshes:Net", "MODEL.LOSS.NAME", "CrossEntropyLoss", "MODEL.DEVICE", "cpu",
    "DATASETS.TRAIN", "['meshes:train']", "DATASETS.TEST", "['meshes:test']", "DATALOADER.BATCH_SIZE", "16",
    "SOLVER.OPTIMIZER.NAME", "AdamW", "SOLVER.BASE_LR", "0.01", "SOLVER.MAX_ITER", "4", "SOLVER.CHECKPOINT_PERIOD", "0",
    "LOG.PERIOD", "1", "SEED", "3", "LOG.WRITERS", "['JSONWriter']", "TEST.METRICS", "['Loss']",
]  # fmt: skip
RUNS = {
    "all": [
        "MODEL.LOSS.NAME", "CrossEntropyLoss", "SOLVER.ACCUMULATION_STEPS", "2", "SOLVER.MAX_ITER", "8",
        "SOLVER.CLIP_GRADIENTS", "{'ENABLED': True, 'CLIP_TYPE': 'norm', 'CLIP_VALUE': 0.5}",
        "HOOKS", "[{'NAME': 'EMA', 'ARGS': {'decay': 0.5}}]", "TEST.EVAL_PERIOD", "4", "SOLVER.CHECKPOINT_PERIOD", "4",
        "CHECKPOINT.BEST.METRIC", "meshes:test/loss", "CHECKPOINT.ASYNC", "True",
    ],
    "autocast": ["SOLVER.AMP.ENABLED", "True"],
    "bfloat16": [],
    "tied": ["MODEL.ARGS.tied", "True"],
    "compiled": [
        "MODEL.COMPILE.ENABLED", "True", "MODEL.COMPILE.MODULES", "['Attention']",
        "MODEL.COMPILE.ARGS.backend", "aot_eager",
    ],
}  # fmt: skip


def config(folder, *options):
    cfg = get_cfg()
    cfg.merge_from_list([*BASE, "OUTPUT_DIR", str(folder), *options])
    return cfg


def mesh_options(mesh, name):
    """The options of a mesh, (replicate, shard, tensor)."""
    if mesh is None:
        return []
    args = dict(zip(("replicate", "shard", "tensor"), mesh, strict=True), min_params=500)
    if name == "bfloat16":
        args |= {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    return ["PARALLEL.NAME", "mesh", "PARALLEL.ARGS", repr(args)]


def run(folder, mesh, name, *more, resume=False):
    given = config(folder, *RUNS[name], *mesh_options(mesh, name), *more)
    trainer = DefaultTrainer(given)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


def parse(text):
    return tuple(map(int, text.split("x"))) if text != "one" else None


def combinations(folder, runs, resumed):
    """Train, and resume copies of runs "all" in other meshes.

    Args:
        folder: of all runs.
        runs: meshes and names of runs, such as ``"2x1x1:all,plain 1x2x1:all"``.
        resumed: pairs of meshes, such as ``"2x1x1-1x2x1"``.
    """
    logging.disable(logging.WARNING)
    for text, _, names in (part.partition(":") for part in runs.split()):
        for name in names.split(","):
            trainer = run(folder / text / name, parse(text), name)
            if name == "all":
                loader = trainer.build_test_loader(trainer.cfg, "meshes:test")
                outputs = trainer.predict(loader, predict=lambda model, batch: model(batch[0]))
                write_predictions(outputs, str(folder / text / "predicted/predictions.jsonl"))
    for pair in resumed.split():
        resume(folder, *pair.split("-"))


def resume(folder, first, then):
    """Resume a copy of a run at iteration 3 in another mesh."""
    copy = folder / f"{first}-{then}"
    if comm.is_main_process():
        shutil.copytree(folder / first / "all", copy)
        (copy / "last_checkpoint").write_text("model_0000003.pth")
    comm.synchronize()
    run(copy, parse(then), "all", resume=True)


class Tied(Net):
    def __init__(self):
        super().__init__(tied=True)


class Scaled(Net):
    """Uses a parameter between two layers that are split, so each rank has a part of its gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(x + self.mlp_proj(self.scale * self.mlp(self.norm2(x)))).transpose(1, 2).contiguous()


class Odd(Net):
    """Has a layer that two ranks cannot split."""

    def __init__(self):
        super().__init__()
        self.odd = nn.Linear(16, 3)

    tensor_parallel_plan = None


# ---------------------------------------------------------------------- checks


def few_steps(strategy, build):
    """The losses of three steps over the same batch on each rank."""
    torch.manual_seed(5)
    model = strategy.wrap(build(), torch.device("cpu"))
    tokens, targets = (part[:16] for part in train().tensors)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(tokens), targets)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return losses


def compare(build):
    alone, split = few_steps(Strategy(), build), few_steps(Mesh(shard=1, tensor=2), build)
    assert split == pytest.approx(alone, rel=1e-5)
    assert alone[2] < alone[0]


def check_layers_are_split_exactly(folder):
    compare(Net)


def check_a_mesh_or_plan_that_does_not_fit_is_an_error_that_names_it(folder):
    gathered = "colwise->replicate"
    for model, args, message in (
        ("Net", {"replicate": 3, "tensor": 1}, "replicate 3 x shard 1 x tensor 1 does not give .* 2. Start 3 ranks"),
        ("Net", {"replicate": -1, "shard": 3, "tensor": 1}, "shard 3 x tensor 1 does not give the number of ranks, 2"),
        ("Net", {"plan": {"atention.q": "colwise"}}, "matches 'atention.q'; did you mean 'attention.q'"),
        ("Net", {"plan": {"mlp": "rowwse"}}, "'rowwse' is not known; did you mean 'rowwise'"),
        ("Net", {"plan": {"mlp": "colwise", "ml?": "rowwise"}}, r"'ml\?' and an earlier pattern match mlp"),
        ("Net", {"plan": {"norm1": gathered}}, "norm1 is a LayerNorm"),
        ("Net", {"plan": {"mlp": "colwise"}}, "shapes cannot be multiplied"),
        ("Tied", {"plan": {"tokens": gathered, "head": gathered}}, "tokens.weight and head.weight are one parameter"),
        ("Odd", {"plan": {"odd": gathered}}, "2 ranks cannot split odd .* of size 3"),
        ("Odd", {}, "needs a plan, and Odd has no tensor_parallel_plan"),
    ):
        args = {"shard": 1, "tensor": 2} | args
        more = ["MODEL.NAME", f"meshes:{model}", "PARALLEL.NAME", "mesh", "PARALLEL.ARGS", repr(args)]
        with pytest.raises((ConfigError, RuntimeError), match=message):
            DefaultTrainer(config(folder, *more)).train()


def check_a_whole_parameter_between_split_layers_is_a_warning_in_evaluations(folder):
    seen, mesh.logger.warning = [], lambda text, *words: seen.append(text % words)
    trainer = DefaultTrainer(
        config(folder, "PARALLEL.NAME", "mesh", "PARALLEL.ARGS.tensor", "2", "MODEL.NAME", "meshes:Scaled")
    )
    trainer.train()
    assert "is not the same on all: rank 1 has another scale than " in seen[0]


def plans_of_transformers(folder):
    import transformers

    class Causal(nn.Module):
        """Returns its scores."""

        def __init__(self, kind):
            super().__init__()
            size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 12}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
            given = getattr(transformers, f"{kind}Config")(**size, **heads)
            self.model = getattr(transformers, f"{kind}ForCausalLM")(given)
            self._tp_plan = {f"model.{pattern}": style for pattern, style in self.model._tp_plan.items()}

        def forward(self, tokens):
            return self.model(input_ids=tokens).logits.transpose(1, 2).contiguous()

    for kind in ("Llama", "Qwen3"):
        compare(partial(Causal, kind))
