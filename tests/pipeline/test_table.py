"""Tables: what is needed, sent and received; tables that cannot be."""

import pytest

from tfdist.pipeline.actions import WorkerExchange, parse
from tfdist.pipeline.schedules import interleaved, one_forward_one_backward, zero_bubble
from tfdist.pipeline.table import Table

TWO = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def written(actions):
    return [str(action) for action in actions]


def test_needs_lists_required_actions():
    table = Table(TWO, 2, 2)
    assert written(table.needs(parse("0F0"))) == []
    assert written(table.needs(parse("1F1"))) == ["0F1"]
    assert written(table.needs(parse("1B1"))) == ["1F1"]
    assert written(table.needs(parse("0B1"))) == ["0F1", "1B1"]


def test_divided_backward_pass_needs_only_input_gradients():
    table = zero_bubble(2, 2)
    assert table.is_divided
    assert written(table.needs(parse("0I1"))) == ["0F1", "1I1"]
    assert written(table.needs(parse("0W1"))) == ["0I1"]
    assert not Table(TWO, 2, 2).is_divided


def test_results_are_sent_at_once_and_expected_one_exchange_ahead():
    table = Table(TWO, 2, 2)
    assert written(table.steps(0)) == ["0F0", "0F0→1 1B0⇢0", "0F1", "0F1→1 1B1⇢0 1B0⇒0", "0B0", "1B1⇒0", "0B1"]
    assert written(table.steps(1)) == ["0F1⇢1 0F0⇒1", "1F0", "1B0", "1B0→0 0F1⇒1", "1F1", "1B1", "1B1→0"]


def test_workers_of_one_process_exchange_nothing():
    table = interleaved(6, 4, 3)
    assert {str(step) for step in table.steps(0, [0, 1, 2])} == set(written(table.rows[0]))
    between = [step for step in table.steps(0, [2]) if isinstance(step, WorkerExchange)]
    others = {table.workers[transfer.destination] for step in between for transfer in step.sent}
    assert others == {1}


@pytest.mark.parametrize(
    "table",
    [
        one_forward_one_backward(4, 6, [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)]),
        zero_bubble(3, 5, [(0, 1), (1, 2), (0, 2)]),
        interleaved(6, 4, 2),
    ],
)
def test_every_sent_result_is_received_once(table):
    sent, received = [], []
    for worker in range(len(table.rows)):
        held, expected = set(), None
        for step in table.steps(worker):
            if not isinstance(step, WorkerExchange):
                for needed in table.needs(step):
                    assert needed in held or (needed, step.stage) in held, f"{step} needs {needed}"
                held.add(step)
                continue
            for transfer in step.sent:
                assert table.workers[transfer.result_of.stage] == worker != table.workers[transfer.destination]
                assert transfer.result_of in held, "results are sent when they are there"
            assert expected in (None, step.received), "what is received is what was expected"
            assert all(table.workers[transfer.destination] == worker for transfer in step.received)
            held.update(step.received)
            sent += step.sent
            received += step.received
            expected = step.expected
    assert set(sent) == set(received)
    assert len(sent) == len(set(sent)) == len(received)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0", "0B0"], ["1F0", "1B0", "1F1", "1B1"]], "the action 0F1 is missing"),
        ([["0F0", "0F0", "0F1", "0B0", "0B1"], TWO[1]], "0F0 stands in the table more than once"),
        ([[*TWO[0], "2F0"], TWO[1]], "for 2 stages and 2 micro-batches has no place for 2F0"),
        ([[*TWO[0], "0F2"], TWO[1]], "has no place for 0F2"),
        ([["0F0", "0F1", "0B0"], TWO[1]], "either B, or I and W, of stage 0 and micro-batch 1; got F"),
        ([["0F0", "0F1", "0B0", "0I1"], TWO[1]], "got F, I"),
        ([["0F0", "0B0", "0W0", "0F1", "0B1"], TWO[1]], "got B, F, W"),
        ([["0B0", "0F0", "0F1", "0B1"], TWO[1]], "0B0 stands before 0F0, which it needs"),
        ([["0F0", "0F1", "0B1", "1F0"], ["0B0", "1B0", "1F1", "1B1"]], "stage 0 stand in the rows of workers"),
        ([["forward"], TWO[1]], "expected an action"),
    ],
)
def test_invalid_tables_raise(rows, message):
    with pytest.raises(ValueError, match=message):
        Table(rows, 2, 2)


def test_a_table_without_training_has_forward_passes_only():
    assert Table([["0F0"], ["1F0"]], 2, 1, training=False).workers == (0, 1)
    with pytest.raises(ValueError, match="forward passes has no place for 0B0"):
        Table([["0F0", "0B0"], ["1F0", "1B0"]], 2, 1, training=False)
