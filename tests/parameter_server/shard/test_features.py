"""Which features a shard has; `test_shard.py` and the test file of each show what they do."""

import pytest

from tfdist.compression import Int8
from tfdist.parameter_server import Asynchronous, DelayCompensated, Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.shard.compressed_answers import CompressedAnswers
from tfdist.parameter_server.shard.delay_compensation import DelayCompensation
from tfdist.parameter_server.shard.features import CompressedPushes, features_of


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (Arguments(), []),
        (Arguments(pushes=Gradients(compression=Int8())), [CompressedPushes]),
        (Arguments(pushes=LocalSteps(2, Int8())), [CompressedPushes]),
        (Arguments(pushes=Gradients(Int8(), Int8())), [CompressedPushes, CompressedAnswers]),
        (Arguments(Asynchronous(DelayCompensated(1.0))), [DelayCompensation]),
        (Arguments(pushes=Hogwild()), []),
    ],
    ids=str,
)
def test_arguments_determine_the_parts(arguments, kinds):
    assert [type(feature) for feature in features_of(arguments)] == kinds
