import numpy as np
import pytest

from tests.quorum.test_exchange import meeting
from tfdist.compression import DeepGradientCompression, Int8, RandomK, TopK, policy
from tfdist.compression.policy import Schedule
from tfdist.quorum.contributions import ContributionEncoder
from tfdist.quorum.exchange import MeetingExchange

SHAPES = [(64, 64), (5,), (3000, 2)]
PATHS = ["dense/kernel", "dense/bias", "other/kernel"]


def chosen(compression):
    return None if compression is None else policy.as_policy(compression)


def changes(seed, dtypes=("float64",) * 3):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype(dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True)]


def test_changes_of_several_dtypes_are_averaged_uncompressed(job):
    made, dtypes = job(2), ("float32", "float64", "float32")
    task_changes = [changes(task, dtypes) for task in range(2)]
    met = meeting(made, [1, 3])

    def work(task):
        contributions = ContributionEncoder(PATHS, SHAPES, None, task)
        return contributions.mean(
            contributions.encode(task_changes[task], 1), MeetingExchange(made.members[task], "a", met)
        )

    means = made.side_by_side(work, range(2))
    for place, (mean, other) in enumerate(zip(*means, strict=True)):
        assert mean.tobytes() == other.tobytes()
        assert mean.shape == SHAPES[place]
        np.testing.assert_allclose(mean, task_changes[0][place] / 4 + task_changes[1][place] * 3 / 4, rtol=1e-6)


@pytest.mark.parametrize("method", [Int8(), TopK(0.1), RandomK(0.25), Schedule({0: None, 2: Int8()})], ids=repr)
def test_compression_residual_is_added_to_next_contribution(job, method):
    """The sum of what all have used, and of what is kept back, is that of all changes."""
    made = job(2)
    senders = [ContributionEncoder(PATHS, SHAPES, chosen(method), task) for task in range(2)]
    total, used = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for number in range(1, 5):
        round_changes = [changes(10 * number + task) for task in range(2)]
        met = meeting(made, [1, 1], attempt=number)

        def work(task, changes_of_tasks=round_changes, number=number, met=met):
            contribution = senders[task].encode(changes_of_tasks[task], number)
            return senders[task].mean(contribution, MeetingExchange(made.members[task], "a", met))

        means = made.side_by_side(work, range(2))
        for place in range(3):
            assert means[0][place].tobytes() == means[1][place].tobytes()
            total[place] += (round_changes[0][place] + round_changes[1][place]) / 2
            used[place] += means[0][place]
    for place, shape in enumerate(SHAPES):
        kept = sum(sender._states[place].arrays.get("residual", np.zeros(shape).reshape(-1)) for sender in senders) / 2
        np.testing.assert_allclose(used[place].reshape(-1) + kept, total[place].reshape(-1), atol=1e-6)


def test_take_back_restores_residual_of_late_contribution():
    contributions = ContributionEncoder(PATHS, SHAPES, chosen(TopK(0.1)), 0)
    contributions.encode(changes(0), 1)
    before = contributions._states[0].arrays["residual"].copy()
    contributions.encode(changes(1), 2)
    assert (contributions._states[0].arrays["residual"] != before).any()
    contributions.take_back()
    np.testing.assert_array_equal(contributions._states[0].arrays["residual"], before)


def test_fewer_bytes_are_sent(job):
    made = job(2)
    met = meeting(made, [1, 1])

    def work(task):
        contributions = ContributionEncoder(PATHS, SHAPES, chosen(Int8()), task)
        contributions.mean(contributions.encode(changes(task), 1), MeetingExchange(made.members[task], "a", met))

    made.side_by_side(work, range(2))
    assert made.members[0].links.bytes_sent < 0.6 * 8 * sum(np.prod(shape) for shape in SHAPES)


def test_unsupported_compression_raises():
    with pytest.raises(ValueError, match="QuorumStrategy cannot compress with DeepGradientCompression"):
        ContributionEncoder(PATHS, SHAPES, chosen(DeepGradientCompression(0.01)), 0)
