import pytest
import torch

from hookline.engine import AMPTrainer, SimpleTrainer


class Net(torch.nn.Linear):
    """Its loss; on batches of NaN it is NaN."""

    def forward(self, batch):
        return {"loss": super().forward(batch).pow(2).mean()}


def trainer(cls, data, device="cpu", **kwargs):
    torch.manual_seed(0)
    net = Net(3, 2, device=device)
    return cls(net, data, torch.optim.SGD(net.parameters(), lr=0.01), **kwargs)


def data(count=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("cls", [SimpleTrainer, AMPTrainer])
@pytest.mark.parametrize("async_write_metrics", [False, True])
def test_every_loss_is_in_the_storage_up_to_the_last_step(cls, async_write_metrics):
    kwargs = {"precision": torch.bfloat16} if cls is AMPTrainer else {}
    made = trainer(cls, data(), async_write_metrics=async_write_metrics, **kwargs)
    made.train(0, 6)
    assert [iteration for _, iteration in made.storage.history("loss").values()] == list(range(6))


@pytest.mark.parametrize("cls", [SimpleTrainer, AMPTrainer])
@pytest.mark.parametrize("async_write_metrics", [False, True])
def test_a_nan_is_an_error_of_its_own_step(cls, async_write_metrics):
    kwargs = {"precision": torch.bfloat16} if cls is AMPTrainer else {}
    poisoned = data()
    poisoned[3] = torch.full((4, 3), float("nan"))
    made = trainer(cls, poisoned, async_write_metrics=async_write_metrics, **kwargs)
    with pytest.raises(FloatingPointError, match="iteration 3"):
        made.train(0, 6)
    assert all(p.isfinite().all() for p in made.model.parameters())


def test_no_step_reads_a_value_that_is_not_in_the_hosts_memory():
    # Tensors on "meta" have no values: reading one is an error. Only the end of the run wants to.
    made = trainer(SimpleTrainer, [batch.to("meta") for batch in data()], device="meta")
    made.clip_gradients = lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        made.train(0, 6)
    assert made.finished_iter == 5
