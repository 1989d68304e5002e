"""The table of what components receive, in docs/components.md."""

import re

from snippets import ROOT

from hookline.engine.data.build import SAMPLER_SLOT
from hookline.engine.data.datasets import TEST_SLOT, TRAIN_SLOT
from hookline.engine.evaluation.build import EVALUATOR_SLOT, METRICS_SLOT, TRAIN_METRICS_SLOT
from hookline.engine.modeling.build import LOSS_SLOT, MODEL_SLOT
from hookline.engine.parallel.base import STRATEGY_SLOT
from hookline.engine.setup.check import HOOK_SLOT, WRITER_SLOT
from hookline.engine.solver.build import OPTIMIZER_SLOT
from hookline.engine.solver.schedules import SCHEDULE_SLOT

SLOTS = [SAMPLER_SLOT, TEST_SLOT, TRAIN_SLOT, EVALUATOR_SLOT, METRICS_SLOT, TRAIN_METRICS_SLOT, LOSS_SLOT, MODEL_SLOT]
SLOTS += [STRATEGY_SLOT, HOOK_SLOT, WRITER_SLOT, OPTIMIZER_SLOT, SCHEDULE_SLOT]


def test_the_table_lists_what_every_place_offers():
    lines = (ROOT / "docs/components.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if re.match(r"\| `[A-Z]+[.`]", line)]
    table = {key: set(re.findall(r"`(\w+)`", row[-1])) for row in rows for key in re.findall(r"`([A-Z._]+)`", row[0])}
    del table["DATALOADER.COLLATE_FN"]  # has no slot
    assert table == {slot.key: set(slot.offers) for slot in SLOTS}
