import pytest
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from hookline.config import ConfigError
from hookline.engine.parallel.tensor_parallel import find_plan


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.q_norm, self.o_proj = nn.Linear(8, 8), nn.LayerNorm(4), nn.Linear(8, 8)


class Model(nn.Module):
    """With a plan as those of transformers."""

    def __init__(self, **plan):
        super().__init__()
        self.embed, self.layers, self.lm_head = nn.Embedding(4, 8), nn.ModuleList([Block()]), nn.Linear(8, 4)
        self._tp_plan = {name.replace("__", ".*."): style for name, style in plan.items()}


def test_a_plan_of_transformers_is_used():
    model = Model(
        embed="embedding_rowwise",
        layers__q_proj="colwise",
        layers__q_norm="replicated_with_grad_allreduce",
        layers__o_proj="rowwise",
        lm_head="colwise_gather_output",
        layers__experts="packed_colwise",  # the model has none
    )
    plan = dict(find_plan(None, model))
    assert isinstance(plan.pop("layers.*.q_norm"), SequenceParallel)
    assert plan == {
        "embed": "rowwise",
        "layers.*.q_proj": "colwise",
        "layers.*.o_proj": "rowwise",
        "lm_head": "colwise->replicate",
    }
    assert find_plan({"lm_head": "replicate"}, model) == {"lm_head": "replicate"}  # the config's comes first


def test_a_style_of_transformers_that_cannot_be_used_is_named():
    with pytest.raises(ConfigError, match=r"style 'packed_colwise' for layers\.\*\.q_proj"):
        find_plan(None, Model(layers__q_proj="packed_colwise"))
    with pytest.raises(ConfigError, match="Model has no tensor_parallel_plan"):  # an empty plan
        find_plan(None, Model())
