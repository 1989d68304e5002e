import io
import random

import numpy as np
import torch

from hookline.hooks.common.rng import capture_rng, preserve_rng, restore_rng


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()


def test_restored_generators_draw_the_same_numbers():
    draw()
    state = through_a_file(capture_rng())
    expected = [draw() for _ in range(3)]
    draw()
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_a_captured_state_is_not_changed_by_drawing():
    state = capture_rng()
    expected = draw()
    for _ in range(2):
        restore_rng(state)
        assert draw() == expected


def test_draws_in_a_preserving_block_do_not_affect_later_draws():
    state = capture_rng()
    expected = draw()
    restore_rng(state)
    with preserve_rng():
        draw()
    assert draw() == expected
