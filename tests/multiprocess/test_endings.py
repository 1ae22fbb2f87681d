"""Processes that end, fail, join or fork at awkward moments: the others are told the truth, and soon."""

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = [str(harness.PROGRAMS / "endings.py")]


def outputs_of(case, codes, left=False):
    with harness.started(PROGRAM, len(codes), {"TEST_CASE": case}) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        assert [end.code for end in ended] == codes, outputs
    if not left:
        harness.assert_nothing_left()
    return [end.output for end in ended]


def test_new_collective_raises_after_another_rank_ended():
    outputs = outputs_of("new_key_after_an_end", [0, 0])
    assert "GOT rank 1 waits in new (call 1), but rank 0" in outputs[1]
    assert "tfdist: the job failed after this rank's script had ended: rank 1" in outputs[0]


def test_caught_failure_is_reported_to_other_ranks():
    outputs = outputs_of("caught_failure", [3, 3])
    assert "GOT MemoryError no more" in outputs[1]
    assert "GOT PeerLostError rank 1" in outputs[0]
    assert "failed: rank 1 failed in a collective: MemoryError: no more" in outputs[0]


def test_a_rank_joins_while_others_use_new_keys():
    for output in outputs_of("new_key_while_one_joins", [0, 0, 0]):
        assert "DONE" in output


def test_group_sum_needs_join_of_its_members_only():
    for output in outputs_of("group_of_some", [0, 0, 0]):
        assert "DONE" in output


def test_failure_is_reported_while_thread_keeps_process_alive():
    with harness.started(PROGRAM, 2, {"TEST_CASE": "thread_that_stays"}) as processes:
        assert processes.popens[0].wait(harness.DEADLINE) == 0, processes.outputs()
        assert "failed: ValueError: a mistake" in processes.output(0)


def test_death_of_rank_is_noticed_despite_forked_children():
    outputs = outputs_of("forked_child", [0, -9], left=True)
    assert "rank 1" in outputs[0]
    assert "died (its connection closed before its script had ended)" in outputs[0]


def test_kill_after_last_collective_is_reported():
    outputs = outputs_of("killed_at_the_end", [1, -9])
    assert "SCRIPT ENDED" in outputs[0]
    assert "tfdist: the job failed after this rank's script had ended: rank 1, worker 1" in outputs[0]
    assert "died (its connection closed before its script had ended)" in outputs[0]
    assert "OTHER EXIT HANDLER" in outputs[0]


def test_kill_while_another_rank_computes_is_reported():
    outputs = outputs_of("killed_before_the_end", [1, -9])
    assert "SCRIPT ENDED" in outputs[0]
    assert "tfdist: the job failed after this rank's script had ended: rank 1, worker 1" in outputs[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_in_mpi_finalization_is_reported(rank):
    codes = [1, 1]
    codes[rank] = -9
    outputs = outputs_of(f"killed_in_finalize_{rank}", codes)
    assert "tfdist: the job failed after this rank's script had ended" in outputs[1 - rank]
    assert f"rank {rank}, worker {rank}" in outputs[1 - rank]


def test_invalid_line_of_rendezvous_server_raises_on_ranks():
    outputs = outputs_of("broken_line", [0, 0])
    assert "GOT PeerLostError the rendezvous server at 127.0.0.1" in outputs[1]
    assert "sent an invalid message (DecodeError" in outputs[1]
    assert "GOT PeerLostError rank 1" in outputs[0]
    assert "failed: the rendezvous server at 127.0.0.1" in outputs[0]
