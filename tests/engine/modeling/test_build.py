import copy

import pytest
import torch
from small_runs import make_trainer
from torch import nn

from hookline.config import ConfigError, get_cfg
from hookline.engine.checkpoint import Checkpointer
from hookline.engine.evaluation import inference_on_dataset
from hookline.engine.modeling import build_adapter, build_model
from hookline.engine.modeling.summary import logs_shapes, model_summary


def make_cfg(name="ConvNet", **args):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.NAME = name
    cfg.MODEL.ARGS.update(args)
    return cfg


def merged(**keys):
    cfg = make_cfg(keys.pop("NAME", "ConvNet"))
    cfg.merge_from_other_cfg({"MODEL": keys})
    return cfg


class Scores(nn.Module):
    def forward(self, x):
        return {"logits": x, "features": None}


def test_adapter_is_built_from_the_config():
    loss = {"NAME": "CrossEntropyLoss", "ARGS": {"label_smoothing": 0.1}}
    mappings = {"INPUT_MAPPING": {"image": "x"}, "OUTPUT_MAPPING": {"logits": "input"}}
    adapter = build_adapter(merged(LOSS=loss, TARGET="class", **mappings))
    batch = {"image": torch.randn(4, 3), "class": torch.tensor([0, 1, 2, 0]), "label": None}
    expected = nn.functional.cross_entropy(batch["image"], batch["class"], label_smoothing=0.1)
    assert torch.equal(adapter.losses(Scores(), batch)["loss"], expected)
    assert adapter.targets(batch) is batch["class"]


COMPILED = {"ENABLED": True}


# Other wrong values of MODEL are in tests/promises/test_wrong_configs.py.
@pytest.mark.parametrize(
    ("check", "keys", "message"),
    [
        (build_adapter, {"INPUTS": "kwarg"}, "INPUTS.*'kwarg'"),
        (build_model, {"COMPILE": {**COMPILED, "ARGS": {"backened": "eager"}}}, r"COMPILE\.ARGS\.backened"),
        (build_model, {"COMPILE": {**COMPILED, "MODULES": ["featurs"]}}, r"COMPILE\.MODULES\[0\]"),
    ],
)
def test_wrong_values_are_found_before_training(check, keys, message):
    with pytest.raises(ConfigError, match=r"MODEL\." + message):
        check(merged(**keys))


def test_channels_last_gives_the_same_outputs():
    torch.manual_seed(0)
    plain, model = build_model(make_cfg()), build_model(merged(CHANNELS_LAST=True))
    model.load_state_dict(plain.state_dict())
    assert model.features[3].weight.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(model(x), plain(x))


def trained(tmp_path, **keys):
    torch.manual_seed(0)
    model_keys = {"NAME": "MLP", "ARGS": {"in_features": 8, "num_classes": 3}, "LOSS": {"NAME": "CrossEntropyLoss"}}
    cfg = merged(**model_keys, **keys)
    model, adapter = build_model(cfg), build_adapter(cfg)
    batches = [(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])) for _ in range(2)]
    make_trainer(model=model, data=batches, adapter=adapter).train(0, 3)
    predictions = []
    inference_on_dataset(model, batches, None, predict=lambda *a: predictions.append(adapter.predict(*a)))
    Checkpointer(model, str(tmp_path)).save("model")
    return model, predictions, torch.load(tmp_path / "model.pth", weights_only=True)["model"]


def test_a_compiled_model_trains_evaluates_and_saves_like_the_plain_one(tmp_path):
    _, expected, names = trained(tmp_path)
    compiled = {**COMPILED, "ARGS": {"backend": "eager"}}
    model, predictions, saved = trained(tmp_path, COMPILE=compiled, ACTIVATION_CHECKPOINTING=["Linear"])
    assert model._compiled_call_impl is not None
    assert saved.keys() == names.keys()
    torch.testing.assert_close(saved, names)
    torch.testing.assert_close(predictions, expected)
    assert copy.deepcopy(model)._compiled_call_impl is None  # a copy, such as an average, is not compiled


def test_submodules_are_compiled_each_on_its_own():
    cfg = make_cfg("GPT", width=8, depth=4, heads=2, block_size=4)
    cfg.MODEL.COMPILE.update(ENABLED=True, MODULES=["TransformerBlock"], ARGS={"backend": "eager"})
    model = build_model(cfg)
    assert model._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in model.blocks)


@pytest.mark.parametrize(("blocks", "names"), [(5, "blocks.4.1 head"), (6, "blocks.5 head"), (12, "blocks head")])
def test_the_table_is_as_deep_as_it_has_twelve_layers(blocks, names):
    several = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(blocks)))
    model = nn.Sequential()
    model.blocks, model.head = several, nn.Linear(4, 2)
    rows = [line.split() for line in model_summary(model).splitlines()]
    assert " ".join(name for name, *_ in rows[-3:-1]) == names


def test_a_layer_with_weights_of_its_own_is_one_row_of_the_table():
    rows = [line.split() for line in model_summary(nn.TransformerEncoderLayer(4, 2, 8)).splitlines()]
    assert ["self_attn", "MultiheadAttention", "80"] in rows


class Mixed(nn.Module):
    """Layers with running statistics and random numbers, one with several outputs, and one that is not called."""

    def __init__(self, more=0):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.memory = nn.LSTM(6, 5)
        self.unused = nn.Linear(2, 2)
        self.unused.weight.requires_grad = False
        self.more = nn.ModuleList(nn.Identity() for _ in range(more))
        for number in range(more):
            self.add_module(f"one{number}", nn.Identity())
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.memory(self.encoder(x))[0].square().mean()


@pytest.mark.parametrize(("more", "rows"), [(0, 6), (8, 12), (9, 0)])
def test_small_models_are_shown_with_the_shapes_of_the_first_batch_and_nothing_is_computed_for_it(log, more, rows):
    def train(show):
        torch.manual_seed(0)
        model, adapter = Mixed(more), build_adapter(get_cfg())
        adapter._layers_logged = not show
        batches = iter([torch.randn(3, 4) for _ in range(2)])
        make_trainer(model=model, data=batches, adapter=adapter).train(0, 2)
        assert model.calls == 2
        return model.state_dict(), torch.rand(1)

    shown = train(True)
    table = log.text.partition("Layers, with the shapes of their outputs:\n")[2].splitlines()
    if rows:
        words = [line.split() for line in table[: rows + 2]]
        assert words[0] == ["layer", "type", "output", "parameters"]
        linear = ["encoder", "Sequential", "(3,", "6)", "42"] if more else ["encoder.0", "Linear", "(3,", "6)", "30"]
        assert words[1] == linear
        assert ["memory", "LSTM", "(3,", "5)", "260"] in words
        assert ["unused", "Linear", "6", "(2", "trained)"] in words
        assert words[-1] == ["total", "Mixed", "308", "(304", "trained)"]
    assert log.text.count("Layers, with") == bool(rows)
    torch.testing.assert_close(train(False), shown, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_layer_of_torchscript_is_one_row_of_the_table(log):
    model = nn.Sequential(torch.jit.trace(nn.Sequential(nn.Linear(4, 2)), torch.ones(3, 4)))
    logs_shapes(model, model)(torch.ones(3, 4))
    assert "(3, 2)          10" in log.text


@pytest.mark.parametrize(
    "compiled", [torch.compile, lambda model: nn.Sequential(torch.compile(model)), nn.Module.compile]
)
def test_compiled_models_are_not_compiled_again_for_the_table(log, compiled):
    layer = nn.Linear(4, 4)
    model = compiled(layer)
    model = layer if model is None else model
    assert logs_shapes(model, model) is model
