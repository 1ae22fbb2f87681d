import keras
import numpy as np
import pytest

from tfdist.local_sgd.rules import Averaging, Elastic, Outer, restore

BEFORE = [np.array([1.0, -2.0]), np.array(3.0)]
MEAN = [np.array([0.5, 1.0]), np.array(-1.0)]
OWN = [np.array([2.0, 0.0]), np.array(1.0)]


@pytest.mark.parametrize("mix", [0.0, 0.25])
def test_averaging_adds_mean_change_and_mixes_own_values(mix):
    rule = Averaging(mix)
    centre = rule.centre(BEFORE, MEAN)
    np.testing.assert_array_equal(centre[0], [1.5, -1.0])
    assert centre[1] == 2.0
    mixed = rule.own(OWN, BEFORE, centre)
    np.testing.assert_allclose(mixed[0], mix * OWN[0] + (1 - mix) * centre[0])
    assert mixed[0] is not centre[0]
    np.testing.assert_array_equal(BEFORE[0], [1.0, -2.0])


def test_an_outer_optimizer_takes_the_difference_for_a_gradient():
    rule = Outer(keras.optimizers.SGD(0.5, momentum=0.5))
    assert rule.centre([], []) == []
    rule = Outer(given := keras.optimizers.SGD(0.5, momentum=0.5))
    first = rule.centre(BEFORE, MEAN)
    np.testing.assert_allclose(first[0], BEFORE[0] + 0.5 * MEAN[0])
    second = rule.centre(first, MEAN)
    np.testing.assert_allclose(second[0], first[0] + 0.5 * 0.5 * MEAN[0] + 0.5 * MEAN[0])
    assert int(given.iterations) == 0, "it works on a copy"
    assert not given.built


def test_elastic_rule_pulls_own_values_to_centre():
    rule = Elastic(0.5).for_fragment(2, delay=0)
    centre = rule.centre(BEFORE, MEAN)
    np.testing.assert_allclose(centre[0], BEFORE[0] + 0.5 * MEAN[0])
    pulled = rule.own(OWN, BEFORE, centre)
    np.testing.assert_allclose(pulled[0], OWN[0] - 0.25 * (OWN[0] - BEFORE[0]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_are_kept(dtype):
    before, mean, own = ([array.astype(dtype) for array in arrays] for arrays in (BEFORE, MEAN, OWN))
    for rule in (Averaging(0.5), Elastic(0.9).for_fragment(3, delay=0), Outer(keras.optimizers.SGD(0.5))):
        centre = rule.centre(before, mean)
        assert {array.dtype for array in (*centre, *rule.own(own, before, centre))} == {np.dtype(dtype)}


def test_states_of_fewer_rules_are_not_restored(caplog):
    """Not by the first ones either, whose variables may have the same shapes."""
    like = [np.ones(3)]
    trained, *others = (Outer(keras.optimizers.SGD(0.5, momentum=0.5)) for _ in range(3))
    trained.centre(like, [np.full(3, 0.25)])
    restore([(rule, like) for rule in others], [trained.state()])
    assert [rule.state() for rule in others] == [[], []]
    assert "training goes on without them" in caplog.text


def test_each_fragment_has_a_rule_of_its_own():
    outer = Outer(keras.optimizers.SGD(0.5, momentum=0.5))
    first, second = outer.for_fragment(2, delay=0), outer.for_fragment(2, delay=0)
    first.centre(BEFORE, MEAN)
    assert first.state()
    assert second.state() == outer.state() == []


@pytest.mark.parametrize(("given", "delay", "mix"), [(None, 0, 0.0), (None, 1, 0.5), (0.25, 0, 0.25), (0, 2, 0.0)])
def test_default_mix_depends_on_delay(given, delay, mix):
    for rule in (Averaging(given), Outer(keras.optimizers.SGD(0.5), given)):
        assert rule.for_fragment(2, delay).mix == mix


def test_names_of_outer_optimizers_do_not_matter():
    first, second = (repr(Outer(keras.optimizers.SGD(0.7, momentum=0.9, name=name))) for name in ("a", "b"))
    assert first == second
    assert "0.9" in first


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Averaging("0.5"), ValueError, r"Averaging\(mix=…\) must be at least 0 and below 1; got '0.5'"),
        (lambda: Outer(keras.optimizers.SGD(), mix=-0.5), ValueError, r"Outer\(mix=…\) .*; got -0.5"),
        (lambda: Averaging(1.0), ValueError, "below 1; got 1.0"),
        (lambda: Outer("sgd"), TypeError, "an optimizer of Keras 3, such as .*; got 'sgd'"),
        (lambda: Elastic(1.5), ValueError, "above 0 and at most 1; got 1.5"),
        (lambda: Elastic("0.5"), ValueError, "above 0 and at most 1; got '0.5'"),
        (lambda: Elastic(0.0), ValueError, "got 0.0"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
