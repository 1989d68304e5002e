from hookline.engine.ranks.agreement import HookList


def test_a_hook_replaced_by_another_of_its_class_changes_the_checksum():
    before = HookList(("IterationTimer", "PeriodicWriter"))
    after = HookList(("IterationTimer", "PeriodicWriter"), changes=2)
    assert before.checksum != after.checksum
    assert before.checksum == HookList(("IterationTimer", "PeriodicWriter")).checksum


def test_the_order_of_hooks_changes_the_checksum():
    assert HookList(("A", "B")).checksum != HookList(("B", "A")).checksum
