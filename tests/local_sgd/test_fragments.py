import pytest

from tfdist.local_sgd.fragments import strided


def test_layers_of_equal_size_are_dealt_out_in_turn():
    assert strided([4] * 6, 3) == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("sizes", [[100, 1, 1, 1, 50, 60], [1, 1, 1], [8, 4, 1000, 4], [0, 0, 0, 7]])
def test_every_variable_is_in_one_fragment_and_none_is_empty(sizes):
    parts = strided(sizes, 3)
    assert sorted(place for part in parts for place in part) == list(range(len(sizes)))
    assert all(parts)


def test_fragments_are_about_equal():
    parts = strided([7, 3, 9, 4, 6, 5, 8, 2, 1, 10], 2)
    loads = [sum([7, 3, 9, 4, 6, 5, 8, 2, 1, 10][place] for place in part) for part in parts]
    assert max(loads) - min(loads) <= 10


def test_more_fragments_than_variables():
    with pytest.raises(ValueError, match="got fragments=3 and a model with 2"):
        strided([1, 1], 3)
