from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.shard.feature import ShardFeature


def test_part_without_overrides_changes_nothing():
    feature, gradients = ShardFeature(), PushedGradients((), [])
    feature.begin([], None)
    feature.attached(0)
    feature.forget(0)
    feature.sent(0, 0, list)
    assert feature.received(None, []) is feature.encoded(None, gradients) is None
    assert feature.corrected(0, 0, gradients, list) is gradients
