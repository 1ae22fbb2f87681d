from tfdist.strategies.step_calls import StepCalls


def test_step_calls_count_batches_and_merge_logs_by_default():
    assert StepCalls() == (True, False, True)
