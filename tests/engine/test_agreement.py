from hookline.engine.agreement import HooksNow


def test_a_hook_in_the_place_of_another_of_its_class_is_another_list_of_hooks():
    before = HooksNow(("IterationTimer", "PeriodicWriter"))
    after = HooksNow(("IterationTimer", "PeriodicWriter"), changes=2)
    assert before.checksum != after.checksum
    assert before.checksum == HooksNow(("IterationTimer", "PeriodicWriter")).checksum


def test_the_order_of_hooks_counts():
    assert HooksNow(("A", "B")).checksum != HooksNow(("B", "A")).checksum
