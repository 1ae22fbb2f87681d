import pytest

from tfdist import whole_numbers


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match=r"PerHost\(roots=…\) must be a whole number of at least 1; got "):
        whole_numbers.check("PerHost(roots=…)", value)


def test_least_number_is_allowed():
    whole_numbers.check("steps", 1)
    whole_numbers.check("delay", 0, least=0)
    with pytest.raises(ValueError, match="delay must be a whole number of at least 2; got 1"):
        whole_numbers.check("delay", 1, least=2)
