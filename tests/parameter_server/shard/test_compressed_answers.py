"""What a server sends; `protocol/test_differences.py` shows that the worker follows."""

import pytest

from tests.parameter_server.differing import Pair, distance
from tfdist import compression as c


def test_compressed_difference_is_smaller_than_whole_parameters():
    pair = Pair(c.TopK(0.01))
    whole = pair.push()
    pair.take(whole)
    pair.move()
    assert sum(array.nbytes for array in pair.push().arrays) < 0.1 * sum(array.nbytes for array in whole.arrays)


def test_a_push_that_comes_again_gets_the_same_answer():
    pair = Pair(c.Int8())
    pair.take(pair.push())
    pair.move()
    answers = [pair.push(), pair.push()]  # two may be under way
    pair.move()
    for sequence, answer in zip((1, 2), answers, strict=True):
        assert pair.push(sequence) is answer
        pair.take(answer)
    assert pair.push(0).copy is None, "nobody waits for this one any more"
    pair.take(pair.push())
    pair.assert_equal()


def test_whole_parameters_are_sent_after_state_is_lost():
    pair = Pair(c.TopK(0.1))
    for doubt in (lambda: pair.server.forget(0), lambda: pair.server.attached(0), pair.worker.forget):
        for _ in range(3):
            pair.move()
            pair.take(pair.push())
        doubt()
        under_way = [pair.push(), pair.push()]
        assert [answer.copy[1] for answer in under_way] == [0, 1]
        found = pair.take(under_way[0])
        assert distance(found, pair.values) == 0
        pair.take(under_way[1])
        pair.assert_equal()


def test_uncompressed_and_sparse_variables_are_sent_whole():
    pair = Pair(c.by_name({"v0": None}, otherwise=c.TopK(0.1)))
    pair.take(pair.push(rows=(2,)))
    pair.move()
    assert pair.push(rows=(2,)).kinds == ("dense", "packed", "dense")


def test_a_schedule_goes_by_the_workers_steps():
    pair = Pair(c.Schedule({0: None, 2: c.Int8()}))
    kinds = []
    for _ in range(4):
        pair.move()
        answer = pair.push()
        kinds.append(answer.kinds)
        pair.take(answer)
        pair.assert_equal()
    assert kinds == [("dense",) * 3] * 2 + [("packed", "dense", "packed")] * 2


@pytest.mark.parametrize("method", [c.DeepGradientCompression(0.01)])
def test_methods_that_cannot_encode_differences_raise(method):
    pair = Pair(method)
    pair.push()
    with pytest.raises(ValueError, match="cannot compress with DeepGradientCompression"):
        pair.push()
