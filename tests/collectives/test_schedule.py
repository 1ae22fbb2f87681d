import numpy as np
import pytest

from tfdist.collectives.schedule import flat, partition


@pytest.mark.parametrize("length", [0, 1, 5, 7, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_partition_covers_all_elements_evenly(length, parts):
    slices = partition(length, parts)
    assert len(slices) == parts
    assert [index for part in slices for index in range(length)[part]] == list(range(length))
    sizes = [part.stop - part.start for part in slices]
    assert max(sizes) - min(sizes) <= 1


def test_flat_is_a_view_and_rejects_non_contiguous_arrays():
    array = np.ones((3, 4))
    assert flat(array).shape == (12,)
    assert np.shares_memory(flat(array), array)
    with pytest.raises(ValueError, match="contiguous"):
        flat(array[:, :2])
