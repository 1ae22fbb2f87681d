from tfdist.strategies.step_calls import StepCalls


def test_where_nothing_is_agreed_on_processes_tell_each_other_everything():
    assert StepCalls() == (True, False, True)
