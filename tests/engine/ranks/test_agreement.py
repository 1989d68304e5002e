from hookline.engine.ranks.agreement import RankHooks


def test_a_hook_replaced_by_another_of_its_class_changes_the_checksum():
    before = RankHooks(("IterationTimer", "PeriodicWriter"))
    after = RankHooks(("IterationTimer", "PeriodicWriter"), changes=2)
    assert before.checksum != after.checksum
    assert before.checksum == RankHooks(("IterationTimer", "PeriodicWriter")).checksum


def test_the_order_of_hooks_changes_the_checksum():
    assert RankHooks(("A", "B")).checksum != RankHooks(("B", "A")).checksum
