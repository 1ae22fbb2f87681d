"""Which features a shard has; `test_shard.py` and `protocol/test_differences.py` show what they do."""

import pytest

from tfdist.compression import Int8
from tfdist.parameter_server import Asynchronous, DelayCompensated, Gradients, Hogwild, LocalSteps
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.shard.parts import (
    CompensatedDelays,
    CompressedAnswers,
    CompressedPushes,
    ShardFeature,
    parts_of,
)


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        (Arguments(), []),
        (Arguments(pushes=Gradients(compression=Int8())), [CompressedPushes]),
        (Arguments(pushes=LocalSteps(2, Int8())), [CompressedPushes]),
        (Arguments(pushes=Gradients(Int8(), Int8())), [CompressedPushes, CompressedAnswers]),
        (Arguments(Asynchronous(DelayCompensated(1.0))), [CompensatedDelays]),
        (Arguments(pushes=Hogwild()), []),
    ],
    ids=str,
)
def test_arguments_determine_the_parts(arguments, kinds):
    assert [type(part) for part in parts_of(arguments)] == kinds


def test_part_without_overrides_changes_nothing():
    part, gradients = ShardFeature(), PushedGradients((), [])
    part.begin([], None)
    part.attached(0)
    part.forget(0)
    part.sent(0, 0, list)
    assert part.received(None, []) is part.encoded(None, gradients) is None
    assert part.corrected(0, 0, gradients, list) is gradients
