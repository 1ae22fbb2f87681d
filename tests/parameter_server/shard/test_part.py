from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.shard.part import Part


def test_part_without_overrides_changes_nothing():
    part, gradients = Part(), PushedGradients((), [])
    part.begin([], None)
    part.attached(0)
    part.forget(0)
    part.sent(0, 0, list)
    assert part.received(None, []) is part.encoded(None, gradients) is None
    assert part.corrected(0, 0, gradients, list) is gradients
