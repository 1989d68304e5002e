import torch

from hookline.engine.data import python_docs_test, python_docs_train


def test_targets_are_the_bytes_that_follow_the_inputs():
    for dataset in (python_docs_train(64), python_docs_test(64)):
        x, y = dataset[0]
        assert x.shape == y.shape == (64,)
        assert x.dtype == torch.int64
        assert torch.equal(x[1:], y[:-1])
        assert bytes(x.tolist()).decode().isprintable() or "\n" in bytes(x.tolist()).decode()


def test_no_piece_is_both_for_training_and_for_testing():
    train, test = python_docs_train(64), python_docs_test(64)
    assert len(train) > 8 * len(test) > 0
    seen = {bytes(x.tolist()) for x in train.tensors[0]}
    repeated = sum(bytes(x.tolist()) in seen for x in test.tensors[0])
    assert repeated < 0.02 * len(test)  # such as lines of dashes, which the text itself repeats
