import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.modeling import (
    MODEL_REGISTRY,
    ConvNet,
    build_loss,
    build_model,
    check_model,
    resolve_device,
)


def make_cfg(name="ConvNet", **args):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.NAME = name
    for key, value in args.items():
        cfg.MODEL.ARGS[key] = value
    return cfg


def test_model_is_built_from_its_name_and_arguments():
    model = build_model(make_cfg(width=4, num_classes=3))
    assert isinstance(model, ConvNet)
    assert model.classifier.out_features == 3


def test_model_that_takes_the_config_gets_it():
    @MODEL_REGISTRY.register()
    class BatchSizeModel(nn.Linear):
        def __init__(self, cfg):
            super().__init__(cfg.DATALOADER.BATCH_SIZE, 1)

    cfg = make_cfg("BatchSizeModel")
    cfg.DATALOADER.BATCH_SIZE = 5
    assert build_model(cfg).in_features == 5


def test_any_importable_class_is_a_model():
    assert isinstance(build_model(make_cfg("torch.nn:Linear", in_features=2, out_features=1)), nn.Linear)


def test_empty_name_says_what_to_set():
    with pytest.raises(ConfigError, match=r"MODEL\.NAME is empty"):
        build_model(make_cfg(""))


def test_unknown_argument_is_named_with_its_key_before_anything_is_built():
    with pytest.raises(ConfigError, match=r"MODEL\.ARGS\.widht.*width"):
        check_model(make_cfg(widht=4))


def test_check_skips_what_is_not_named():
    check_model(make_cfg(""))


def test_loss_is_built_with_its_arguments():
    cfg = make_cfg()
    assert build_loss(cfg) is None
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.MODEL.LOSS.ARGS.label_smoothing = 0.1
    loss = build_loss(cfg)
    assert isinstance(loss, nn.CrossEntropyLoss)
    assert loss.label_smoothing == 0.1


def test_auto_device_is_one_that_works():
    assert torch.ones(1, device=resolve_device("auto")).item() == 1.0


@pytest.mark.parametrize("name", ["gpu", "cpuu", "meta", "", "cuda:99", "cuda:256"])
def test_device_that_is_not_there_is_an_error_naming_the_key(name):
    with pytest.raises(ConfigError, match=r"MODEL\.DEVICE"):
        resolve_device(name)
