from tfdist.parameter_server.protocol.messages import Attach
from tfdist.parameter_server.protocol.programs import Programs


def begun(worker, model="a", place=0, incarnation=1, variables=("x",)):
    return Attach(0, worker, incarnation, model, 0, place, variables)


def noted(*messages):
    programs = Programs()
    for message in messages:
        program = programs.note(message)
    return programs.differences(messages[-1]), program


def test_equal_models_have_no_differences():
    assert noted(begun(0), begun(1), begun(1, "b", 1), begun(0, "b", 1))[0] == []


def test_a_workers_model_is_compared_with_the_chiefs():
    ((message, why),), _ = noted(begun(0), begun(1, "b", variables=("y",)))
    assert message.worker == 1
    assert why.startswith("another model than the chief's: variable 1 is y, the chief's is x.")


def test_options_of_optimizers_are_compared():
    chief, other = (Attach(0, worker, 1, "a", options=(f"momentum=0.{worker}", "nesterov=True")) for worker in (0, 1))
    ((message, why),), _ = noted(chief, other)
    assert message.worker == 1
    assert why.startswith("another optimizer than the chief's: momentum=0.1, the chief's momentum=0.0.")


def test_chiefs_model_is_compared_with_all_workers():
    differences, _ = noted(begun(1, "b"), begun(2), begun(3, "c"), begun(0))
    assert [message.worker for message, _ in differences] == [1, 3]
    assert differences[0][1].startswith("this task trains the model b, but the chief trains a.")


def test_models_without_a_chief_are_not_compared():
    assert noted(begun(1), begun(2, "b"))[0] == []


def test_another_task_can_replace_the_chief():
    programs = Programs(chief=7)
    for message in (begun(0), begun(7, "b"), begun(8)):
        programs.note(message)
    assert [message.worker for message, _ in programs.differences(begun(8))] == [8]


def test_restarted_process_may_skip_models():
    differences, program = noted(begun(0), begun(1), begun(1, "b", incarnation=2))
    assert differences == []
    assert not program.is_first


def test_the_models_of_a_process_are_one_program():
    """Each of them enters by itself, with an incarnation of its own."""

    def attach(worker, place, model):
        return Attach(0, worker, 10 * worker + place, model, 0, place, (), program=worker + 1)

    differences, program = noted(attach(0, 0, "a"), attach(0, 1, "b"), attach(1, 0, "a"), attach(1, 1, "c"))
    assert program.is_first
    assert [why.partition(".")[0] for _, why in differences] == ["this task trains the model c, but the chief trains b"]
