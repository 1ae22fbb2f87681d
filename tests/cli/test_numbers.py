import argparse

import pytest

from tfdist.cli.numbers import count, positive, seconds


def test_numbers_are_parsed():
    assert (count("0"), positive("12"), seconds("0.5")) == (0, 12, 0.5)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "²"])
def test_other_whole_numbers_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a whole number of at least 1, got '{text}'"):
        positive(text)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "x"])
def test_other_seconds_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a number of seconds above 0, got '{text}'"):
        seconds(text)
