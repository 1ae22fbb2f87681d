"""Policies and schedules."""

import pytest

from tfdist import compression as c
from tfdist.compression.policy import as_policy, check_scatters, chosen


def at(compression, name="dense/kernel", shape=(100, 100), step=0):
    schedule = chosen(as_policy(compression), name, shape)
    return schedule and schedule.at(step)


def test_a_bare_method_is_for_large_matrices():
    assert at(c.Int8(stochastic=True)) == c.Int8(stochastic=True)
    assert at(c.Int8(stochastic=True), shape=(31, 33)) is None
    assert at(c.Int8(stochastic=True), shape=(5000,)) is None
    assert at(None) is None


def test_biased_methods_get_feedback():
    assert at(c.TopK()) == c.ErrorFeedback(c.TopK())
    assert at(c.WithoutFeedback(c.TopK())) == c.WithoutFeedback(c.TopK())
    assert at(c.DeepGradientCompression()) == c.DeepGradientCompression()
    assert at(c.FewerWorkers(2, c.TopK())) == c.FewerWorkers(2, c.ErrorFeedback(c.TopK()))


@pytest.mark.parametrize("method", [c.TopK(0.1), c.PowerSGD(2), c.TernGrad(), c.ErrorFeedback(c.TopK(0.1))], ids=str)
def test_methods_that_send_whole_tensors_do_not_scatter(method):
    for choice in (method, c.FewerWorkers(1, method), c.Schedule({0: None, 10: method})):
        with pytest.raises(ValueError, match=r"^\w+\(.*\) for dense/kernel compresses .* Use Float16") as caught:
            check_scatters(choice, "dense/kernel")
        assert "Feedback" not in str(caught.value), "the method is named, and not the feedback that it gets"


@pytest.mark.parametrize("method", [c.Float16(), c.Int8(), c.SignSGD(), c.OneBit(), c.QSGD(), None], ids=str)
def test_methods_that_send_parts_scatter(method):
    check_scatters(method)
    check_scatters(c.Schedule({0: c.FewerWorkers(1, method), 10: method}))


def test_by_size_chooses_by_number_of_elements():
    policy = c.by_size({0: None, 10: c.QSGD(), 1000: c.RandomK()})
    assert at(policy, shape=(3, 3)) is None
    assert at(policy, shape=(10,)) == c.QSGD()
    assert at(policy, shape=(10, 100)) == c.RandomK()


def test_by_name_chooses_by_first_matching_pattern():
    policy = c.by_name({"bias|gamma": None, "embed": c.QSGD()}, otherwise=c.skip_small(c.RandomK(), elements=50))
    assert at(policy, name="embedding/bias") is None
    assert at(policy, name="embedding/table", shape=(2,)) == c.QSGD()
    assert at(policy, shape=(5, 9)) is None
    assert at(policy, shape=(50,)) is None
    assert at(policy, shape=(5, 10)) == c.RandomK()


def test_schedule_chooses_by_step_and_repeats():
    schedule = c.Schedule({0: c.FewerWorkers(1), 10: None, 20: c.RandomK()}, every=100)
    steps = [at(schedule, step=step) for step in (0, 9, 10, 19, 20, 99, 100, 115)]
    few = c.FewerWorkers(1)
    assert steps == [few, few, None, None, c.RandomK(), c.RandomK(), few, None]
    assert at(schedule, shape=(10, 10)) is None


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: as_policy("topk"), TypeError, "compression must be None or one of Method, .*; got 'topk'"),
        (lambda: as_policy(c.TopK), TypeError, r"an object, such as TopK\(\); got the class TopK"),
        (lambda: c.Schedule({1: None}), ValueError, "begins with step 0"),
        (lambda: c.Schedule({0: None, 5: c.TopK()}, every=5), ValueError, "above the last step"),
        (lambda: c.Schedule({0: c.by_size({0: None})}), TypeError, "each choice of a schedule must be"),
        (lambda: c.by_size({5: None}), ValueError, "a choice for 0 elements"),
        (lambda: c.by_name({"a": 3}), TypeError, "got 3"),
        (lambda: c.FewerWorkers(0), ValueError, "at least 1"),
    ],
)
def test_invalid_policies_raise(make, error, words):
    with pytest.raises(error, match=words):
        make()
