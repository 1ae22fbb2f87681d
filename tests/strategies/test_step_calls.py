from tfdist.strategies.step_calls import StepCalls


def test_step_calls_exchange_everything_by_default():
    assert StepCalls() == (True, False, True)
