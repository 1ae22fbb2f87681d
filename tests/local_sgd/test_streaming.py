import pytest

from tfdist.local_sgd import Every, Growing, Streaming


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fragments": 0}, r"Streaming\(fragments=…\) must be a whole number of at least 1; got 0"),
        ({"delay": True}, r"Streaming\(delay=…\) must be a whole number of at least 0; got True"),
        ({"delay": -1}, "got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Streaming(**arguments)


@pytest.mark.parametrize(
    ("streaming", "interval", "message"),
    [
        (Streaming(), Every(1), None),
        (Streaming(4, delay=1), Every(8), None),
        (Streaming(4, delay=2), Every(8), "one begins every 2 steps: choose a delay below 2"),
        (Streaming(4), Every(2), "at least one step for each fragment; got 2 steps"),
        (Streaming(delay=1), Growing(1, 10), "choose a delay below 1"),
    ],
)
def test_exchanges_end_before_the_next_ones_begin(streaming, interval, message):
    if message is None:
        streaming.check(interval)
    else:
        with pytest.raises(ValueError, match=message):
            streaming.check(interval)
