import pytest
import torch
from small_runs import Net

from hookline.engine import AMPTrainer, SimpleTrainer


def trainer(cls, data, device="cpu", **kwargs):
    torch.manual_seed(0)
    net = Net(3, 2).to(device)
    return cls(net, data, torch.optim.SGD(net.parameters(), lr=0.01), **kwargs)


def data(count=6):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("cls", [SimpleTrainer, AMPTrainer])
@pytest.mark.parametrize("async_write_metrics", [False, True])
def test_the_storage_has_every_loss_and_a_nan_is_an_error_in_its_own_step(cls, async_write_metrics):
    kwargs = {"precision": torch.bfloat16} if cls is AMPTrainer else {}
    poisoned = [*data(), torch.full((4, 3), float("nan")), *data()]
    made = trainer(cls, poisoned, async_write_metrics=async_write_metrics, **kwargs)
    with pytest.raises(FloatingPointError, match="iteration 6"):
        made.train(0, 9)
    assert [iteration for _, iteration in made.storage.history("loss").values()][:6] == list(range(6))
    assert all(p.isfinite().all() and p.dtype == torch.float32 for p in made.model.parameters())


def test_no_step_waits_for_the_device():
    # Tensors on "meta" have no values, and reading one is an error. Only the end of the run reads some.
    made = trainer(SimpleTrainer, [batch.to("meta") for batch in data()], device="meta")
    made.clip_gradients = lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        made.train(0, 6)
    assert made.finished_iter == 5


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_first_update_leaves_weights_and_momentum_as_they_are(fused):
    net = Net(3, 2)
    before = net.fc.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)  # the scaled gradients are infinite
    made = AMPTrainer(net, [100 * batch for batch in data()], optimizer, grad_scaler=scaler, precision=torch.bfloat16)
    made.train(0, 1)
    assert torch.equal(net.fc.weight, before)
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())
    scaler.update(1.0)
    made.train(1, 2)
    assert 0 < (net.fc.weight - before).abs().max() < 1
