"""One, two and four ranks make the same run: PITFALLS 31."""

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.timeout(400)

# 37 samples in batches of 8: the last one of an epoch is of 5, which no number of ranks but 1 divides.
RUNS = """
import logging, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from hookline.engine import SimpleTrainer, hooks
from hookline.engine.data import ArrayDataset, EpochSampler, GlobalBatchSampler
from hookline.engine.modeling import ModelAdapter
from hookline.engine.parallel import STRATEGY_REGISTRY
from torch.utils.data import DataLoader

def loader(batch_size=8):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(37, 6, generator=generator), torch.randint(3, (37,), generator=generator)
    data = ArrayDataset(x, y)
    return DataLoader(data, batch_sampler=GlobalBatchSampler(EpochSampler(37, seed=1), batch_size),
                      collate_fn=data.collate_fn)

class Tokens(nn.Module):
    # A mean over items, of which each sample has another number.
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
    def forward(self, batch):
        x, y = batch
        counts = (x[:, 0] > 0).sum() if (x[:, 0] > 0).any() else torch.tensor(0)
        losses = nn.functional.cross_entropy(self.layer(x), y, reduction="none")
        mask = x[:, 0] > 0
        return {"loss": (losses * mask).sum() / mask.sum().clamp(min=1), "num_items": mask.sum()}

def run(model, adapter, accumulation_steps=1, strategy=None, count=None, clip=None, period=20):
    torch.manual_seed(7)
    model = model()
    strategy = STRATEGY_REGISTRY.build("ddp", strategy or {})
    model = strategy.wrap(model, torch.device("cpu"))
    if count is not None and isinstance(model, DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        def counting(state, bucket):
            count.append(1)
            return default_hooks.allreduce_hook(state, bucket)
        model.register_comm_hook(None, counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = SimpleTrainer(model, loader(), optimizer, adapter=adapter, accumulation_steps=accumulation_steps,
                            strategy=strategy, clip_gradients=clip)
    trainer.register_hooks([hooks.PeriodicWriter([], period=period)])
    trainer.train(0, 12)
    histories = trainer.storage.histories()
    return {
        "losses": [value for value, _ in histories["total_loss"].values()],
        "weights": [p.flatten().tolist() for p in model.parameters()],
        "ranks": sorted(name for name in histories if name.startswith("ranks/")),
    }

def main(folder):
    logging.disable(logging.INFO)
    plain = lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    loss = ModelAdapter(nn.CrossEntropyLoss())
    exchanges = []
    clip = lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)
    results = {
        "plain": run(plain, loss),
        "clipped": run(plain, loss, clip=clip),
        "accumulated": run(plain, loss, accumulation_steps=2, count=exchanges),
        "items": run(Tokens, ModelAdapter()),
        "items accumulated": run(Tokens, ModelAdapter(), accumulation_steps=2),
        "static": run(plain, loss, strategy={"static_graph": True}),
        "static accumulated": run(plain, loss, strategy={"static_graph": True}, accumulation_steps=3),
        "bf16": run(plain, loss, strategy={"compression": "bf16"}),
    }
    results["exchanges"] = len(exchanges)
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps(results))
"""

EXACT = ("plain", "clipped", "accumulated", "items", "items accumulated", "static", "static accumulated")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    code, output, (results,) = run_ranks(RUNS, 1, tmp_path_factory.mktemp("one"))
    assert code == 0, output
    return results


def compare(alone, ranks, folder):
    code, output, results = run_ranks(RUNS, ranks, folder)
    assert code == 0, output
    for name in EXACT:
        for result in results:
            assert result[name]["losses"] == pytest.approx(alone[name]["losses"], abs=2e-6), name
            for ours, theirs in zip(result[name]["weights"], alone[name]["weights"], strict=True):
                assert ours == pytest.approx(theirs, abs=2e-6), name
        assert all(result[name]["losses"] == results[0][name]["losses"] for result in results), name
    return results


def test_two_ranks_have_the_losses_and_weights_of_one(alone, tmp_path):
    results = compare(alone, 2, tmp_path)
    # The whole point of accumulating without sync: one exchange an update, not one a micro-batch.
    assert [result["exchanges"] for result in results] == [12, 12]
    # bfloat16 has 8 bits: near, and not the same.
    for ours, theirs in zip(results[0]["bf16"]["weights"], alone["bf16"]["weights"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-2)
    assert results[0]["bf16"]["weights"] != results[0]["plain"]["weights"]
    # How the ranks' times compare is only of interest where there are several. (No hook puts "time" here.)
    assert alone["plain"]["ranks"] == []
    assert results[1]["plain"]["ranks"] == ["ranks/data_time_max", "ranks/data_time_mean", "ranks/slowest"]


@pytest.mark.slow
def test_four_ranks_have_the_losses_and_weights_of_one(alone, tmp_path):
    compare(alone, 4, tmp_path)


def test_the_runs_that_are_compared_do_learn(alone):
    losses = alone["plain"]["losses"]
    assert sum(losses[-4:]) < sum(losses[:4])
