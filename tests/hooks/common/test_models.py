from torch import nn

from hookline.hooks.common.models import describe_no_match, matches


class Block(nn.Linear):
    pass


def test_a_star_matches_within_one_part_of_a_name():
    assert matches("blocks.*", "blocks.0")
    assert matches("*.0", "blocks.0")
    assert not matches("blocks.*", "blocks.0.norm")
    assert not matches("blocks", "blocks.0")


def test_a_pattern_matches_classes_and_base_classes_but_not_every_module():
    assert matches("Block", "a", Block(1, 1))
    assert matches("Lin*", "a", Block(1, 1))
    assert not matches("Module", "a", Block(1, 1))


def test_the_error_has_the_nearest_name_and_lists_all_names():
    text = describe_no_match(nn.Sequential(Block(1, 1)), "Blok")
    assert "did you mean" in text
    assert "Submodules: 0. Classes: Block" in text
