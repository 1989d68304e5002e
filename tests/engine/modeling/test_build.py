import copy
import logging

import pytest
import torch
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine import SimpleTrainer
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.evaluation import inference_on_dataset
from hookline.engine.modeling import (
    MODEL_REGISTRY,
    ConvNet,
    ModelAdapter,
    build_adapter,
    build_loss,
    build_model,
    check_model,
    model_summary,
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


def test_check_skips_an_empty_name():
    check_model(make_cfg(""))


def test_loss_is_built_with_its_arguments():
    cfg = make_cfg()
    assert build_loss(cfg) is None
    cfg.MODEL.LOSS.NAME = "CrossEntropyLoss"
    cfg.MODEL.LOSS.ARGS.label_smoothing = 0.1
    loss = build_loss(cfg)
    assert isinstance(loss, nn.CrossEntropyLoss)
    assert loss.label_smoothing == 0.1


def test_auto_selects_a_working_device():
    assert torch.ones(1, device=resolve_device("auto")).item() == 1.0


@pytest.mark.parametrize("name", ["gpu", "cpuu", "meta", "", "cuda:99", "cuda:256"])
def test_a_missing_device_is_an_error_that_names_the_key(name):
    with pytest.raises(ConfigError, match=r"MODEL\.DEVICE"):
        resolve_device(name)


# ---------------------------------------------------------------------------- the adapter


def merged(**keys):
    cfg = make_cfg(keys.pop("NAME", "ConvNet"))
    cfg.merge_from_other_cfg({"MODEL": keys})
    return cfg


def test_adapter_is_built_from_the_config():
    cfg = merged(
        LOSS={"NAME": "CrossEntropyLoss", "ARGS": {"label_smoothing": 0.1}},
        INPUT_MAPPING={"image": "x"},
        OUTPUT_MAPPING={"logits": "input"},
        TARGET="class",
    )
    check_model(cfg)
    adapter = build_adapter(cfg)
    assert isinstance(adapter, ModelAdapter)

    class Scores(nn.Module):
        def forward(self, x):
            return {"logits": x, "features": None}

    batch = {"image": torch.randn(4, 3), "class": torch.tensor([0, 1, 2, 0]), "label": None}
    expected = nn.functional.cross_entropy(batch["image"], batch["class"], label_smoothing=0.1)
    assert torch.equal(adapter.losses(Scores(), batch)["loss"], expected)
    assert adapter.targets(batch) is batch["class"]


def test_the_default_adapter_has_no_loss_and_automatic_inputs():
    adapter = build_adapter(make_cfg())
    assert adapter.loss is None
    assert adapter.inputs == "auto"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"INPUT_MAPPING": {"image": "y"}}, r"MODEL\.INPUT_MAPPING: ConvNet takes no 'y'\. It takes: x"),
        ({"INPUT_MAPPING": {"image": "x", "picture": "x"}}, r"MODEL\.INPUT_MAPPING: 'image' and 'picture'.*'x'"),
        ({"INPUT_MAPPING": {"image": 1}}, r"MODEL\.INPUT_MAPPING\.image: expected a parameter's name, got 1"),
        ({"INPUT_MAPPING": {"image": "x"}, "INPUTS": "batch"}, r"MODEL\.INPUT_MAPPING.*MODEL\.INPUTS \"batch\""),
        (
            {"LOSS": {"NAME": "MSELoss"}, "OUTPUT_MAPPING": {"logits": "inputs"}},
            r"MODEL\.OUTPUT_MAPPING: MSELoss takes no 'inputs'; did you mean 'input'\? It takes: input, target",
        ),
        ({"ACTIVATION_CHECKPOINTING": [1]}, r"MODEL\.ACTIVATION_CHECKPOINTING\[0\]: expected a submodule's name"),
        ({"COMPILE": {"ARGS": {"backened": "eager"}}}, r"MODEL\.COMPILE\.ARGS\.backened.*did you mean 'backend'"),
        ({"COMPILE": {"ARGS": {"dynamic": "maybe"}}}, r"MODEL\.COMPILE\.ARGS\.dynamic: expected bool"),
    ],
)
def test_wrong_values_are_found_before_anything_is_built(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_model(merged(**keys))


def test_inputs_is_one_of_four():
    with pytest.raises(ConfigError, match=r"MODEL\.INPUTS: 'kwarg' is not one of.*did you mean 'kwargs'"):
        merged(INPUTS="kwarg")


# ---------------------------------------------------------------------------- memory format, checkpointing, compilation


def test_channels_last_gives_the_same_outputs():
    torch.manual_seed(0)
    plain = build_model(make_cfg())
    torch.manual_seed(0)
    model = build_model(merged(CHANNELS_LAST=True))
    weight = model.features[3].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(model(x), plain(x))
    model.load_state_dict(plain.state_dict())
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_without_convolutions_logs_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="hookline"):
        build_model(merged(NAME="MLP", ARGS={"in_features": 2, "num_classes": 2}, CHANNELS_LAST=True))
    assert "MODEL.CHANNELS_LAST does nothing: MLP" in caplog.text


def test_activation_checkpointing_can_be_configured():
    model = build_model(merged(ACTIVATION_CHECKPOINTING=["features"]))
    assert "forward" in vars(model.features)
    with pytest.raises(ConfigError, match=r"MODEL\.ACTIVATION_CHECKPOINTING\[0\].*did you mean 'features'"):
        build_model(merged(ACTIVATION_CHECKPOINTING=["feature"]))


def trained(tmp_path, **keys):
    torch.manual_seed(0)
    cfg = merged(ARGS={"width": 4, "num_classes": 3}, LOSS={"NAME": "CrossEntropyLoss"}, **keys)
    check_model(cfg)
    model = build_model(cfg)
    assert type(model) is ConvNet
    batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    adapter = build_adapter(cfg)
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), 0.1), adapter=adapter)
    trainer.train(0, 3)
    predictions = []
    inference_on_dataset(model, batches, None, predict=lambda *a: predictions.append(adapter.predict(*a)))
    Checkpointer(model, str(tmp_path)).save("model")
    return model, predictions, torch.load(tmp_path / "model.pth", weights_only=True)["model"]


@pytest.mark.parametrize(("backend", "checkpointing"), [("eager", []), ("aot_eager", []), ("aot_eager", ["features"])])
def test_a_compiled_model_trains_evaluates_and_saves_like_the_plain_one(tmp_path, backend, checkpointing):
    plain, expected, names = trained(tmp_path)
    model, predictions, saved = trained(
        tmp_path,
        COMPILE={"ENABLED": True, "ARGS": {"backend": backend}},
        ACTIVATION_CHECKPOINTING=checkpointing,
    )
    assert model._compiled_call_impl is not None
    assert saved.keys() == names.keys() == plain.state_dict().keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, names[name])
    torch.testing.assert_close(predictions, expected)
    assert copy.deepcopy(model)._compiled_call_impl is None  # a copy, such as an average, is not compiled


def test_submodules_are_compiled_each_on_its_own_and_equal_ones_once():
    from torch._dynamo.testing import CompileCounter  # slow

    counter = CompileCounter()
    cfg = make_cfg("GPT", width=8, depth=10, heads=2, block_size=4)
    cfg.MODEL.COMPILE.ENABLED, cfg.MODEL.COMPILE.MODULES = True, ["TransformerBlock"]
    cfg.MODEL.COMPILE.ARGS.backend = "eager"
    model = build_model(cfg)
    assert model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    for block in model.blocks:
        block.compile(backend=counter)
    model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    assert counter.frame_count == 1


def test_an_unknown_part_to_compile_is_an_error():
    with pytest.raises(ConfigError, match=r"MODEL\.COMPILE\.MODULES\[0\]: ConvNet has no .* did you mean 'features'"):
        build_model(merged(COMPILE={"ENABLED": True, "MODULES": ["featurs"]}))
    with pytest.raises(ConfigError, match=r"MODEL\.COMPILE\.MODULES\[0\]: expected a submodule's name, got 3"):
        check_model(merged(COMPILE={"MODULES": [3]}))


def test_an_unknown_backend_is_found_before_training():
    with pytest.raises(
        ConfigError, match=r"MODEL\.COMPILE\.ARGS\.backend: there is no 'inductr'; did you mean 'inductor'"
    ):
        check_model(merged(COMPILE={"ENABLED": True, "ARGS": {"backend": "inductr"}}))


def test_compile_errors_of_torch_name_the_key():
    with pytest.raises(ConfigError, match=r"MODEL\.COMPILE\.ARGS: .*mode"):
        build_model(merged(COMPILE={"ENABLED": True, "ARGS": {"mode": "fastest"}}))


# ---------------------------------------------------------------------------- the table of the layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return {"out": self.norm(self.fc(self.fc(x)))}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.block(x)["out"])


def table(text):
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


def test_the_table_has_two_levels_and_counts_what_is_trained():
    model = Net()
    model.head.weight.requires_grad = False
    rows = {line.split()[0]: line.split()[1:] for line in model_summary(model).splitlines()}
    assert rows["layer"] == ["type", "parameters"]
    assert rows["block"] == ["Block", "28"]
    assert rows["fc"] == ["Linear", "20"]
    assert rows["total"] == ["Net", "38", "(30", "trained)"]


def test_many_layers_are_shown_in_part():
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(20)))
    assert len(model_summary(deep).splitlines()) == 22  # without the layers in them
    long = nn.Sequential(*(nn.ReLU() for _ in range(50)))
    assert "... and 20 more" in model_summary(long)
