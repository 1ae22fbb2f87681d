"""Weighted means among several processes, here threads with real links."""

import itertools

import numpy as np
import pytest

from tfdist.cluster.quorum_messages import ContributionsMissing, Meeting, Partner
from tfdist.errors import MismatchError
from tfdist.quorum import exchange
from tfdist.quorum.exchange import AbortedError, MeetingExchange


def meeting(job, samples, attempt=1):
    partners = [Partner(task, count, job.members[task].links.address) for task, count in enumerate(samples)]
    return Meeting(attempt, tuple(partners))


def means(job, samples, vectors, attempt=1):
    met = meeting(job, samples, attempt)
    return job.side_by_side(
        lambda task: MeetingExchange(job.members[task], "a", met).mean("0", vectors[task]), range(len(samples))
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_weighted_means_are_bitwise_equal_on_all_tasks(job, monkeypatch, size):
    monkeypatch.setattr(exchange, "PIECE_BYTES", 1 << 14)
    made, generator = job(size), np.random.default_rng(size)
    samples = [task + 1 for task in range(size)]
    tolerances = (("float32", 1e-6), ("float64", 1e-14), ("float16", 5e-3))
    cases = itertools.product((0, 1, 2, 3, 1000, 4096, 70_001), tolerances)
    for attempt, (elements, (dtype, atol)) in enumerate(cases, 1):
        vectors = [generator.normal(size=elements).astype(dtype) for _ in range(size)]
        averages = means(made, samples, vectors, attempt)
        parts = zip(vectors, samples, strict=True)
        expected = sum(vector.astype("float64") * count / sum(samples) for vector, count in parts)
        np.testing.assert_allclose(averages[0], expected, rtol=0, atol=atol)
        for vector in averages:
            assert vector.dtype == dtype
            assert vector.tobytes() == averages[0].tobytes()


def test_tasks_without_samples_have_no_weight_unless_all_lack_samples(job):
    made = job(2)
    vectors = [np.full(5, np.nan), np.ones(5)]
    np.testing.assert_array_equal(means(made, [0, 3], vectors)[0], np.ones(5))
    np.testing.assert_array_equal(means(made, [0, 0], [np.zeros(5), np.ones(5)], 2)[1], np.full(5, 0.5))


def test_payloads_are_decoded_by_all_in_the_same_order(job):
    made, met = job(3), None
    met = meeting(made, [1, 1, 2])
    payloads = [np.arange(7, dtype=np.uint8) * (task + 1) for task in range(3)]
    averages = made.side_by_side(
        lambda task: MeetingExchange(made.members[task], "a", met).mean_of_payloads(
            "0", payloads[task], lambda payload: payload.astype("float64")
        ),
        range(3),
    )
    for average in averages:
        np.testing.assert_allclose(average, (payloads[0] + payloads[1] + 2.0 * payloads[2]) / 4)


def test_aborted_meeting_raises(job):
    made = job(2)

    def abort():
        with made.members[0].links.arrived:
            made.aborted[0, "a"] = 1
            made.members[0].links.arrived.notify_all()

    def work(task):
        if task:
            abort()
            return
        with pytest.raises(AbortedError):
            MeetingExchange(made.members[0], "a", meeting(made, [1, 1])).mean("0", np.zeros(3))

    made.side_by_side(work, range(2))


@pytest.mark.parametrize("sends_own", [False, True])
def test_silent_partner_is_reported_as_lacking(job, monkeypatch, sends_own):
    made = job(3, grace=0.2)
    met = meeting(made, [1, 1, 1])
    reported = []

    def lacks(rounds, attempt, tasks):
        reported.append(ContributionsMissing(rounds, attempt, tuple(tasks)))
        made.aborted[0, "a"] = made.aborted[1, "a"] = 1

    def work(task):
        meeting_exchange = MeetingExchange(made.members[task], "a", met)
        if task == 2:
            if sends_own:
                meeting_exchange._send("own 0", [np.zeros(1)] * 3)
            return
        monkeypatch.setattr(made.members[task], "lacks", lacks)
        with pytest.raises(AbortedError):
            meeting_exchange.mean("0", np.zeros(3))

    made.side_by_side(work, range(3))
    assert set(reported) == {ContributionsMissing("a", 1, (2,))}


def test_vectors_of_another_length_are_an_error(job):
    made = job(2)
    met = meeting(made, [1, 1])

    def work(task):
        with pytest.raises(MismatchError, match=f"expected .* from task {1 - task}; got"):
            MeetingExchange(made.members[task], "a", met).mean("0", np.zeros(4 + 4 * task))

    made.side_by_side(work, range(2))


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_array_with_lost_piece_counts_as_missing(job, monkeypatch, lost):
    """As when a connection is reset in between; it is no array of another size, and the meeting ends without it."""
    monkeypatch.setattr(exchange, "PIECE_BYTES", 64)
    made = job(2, grace=0.3)
    first, second = made.members
    send = second.links.send

    def losing(address, message, array):
        if message.place != lost or not message.kind.startswith("own"):
            send(address, message, array)

    monkeypatch.setattr(second.links, "send", losing)
    met = meeting(made, [1, 1])

    def work(task):
        with pytest.raises(AbortedError):
            MeetingExchange(made.members[task], "a", met).mean("0", np.ones(80, np.float32))

    lacked = []
    for member in made.members:
        monkeypatch.setattr(member, "is_aborted", lambda rounds, attempt: bool(lacked))
    monkeypatch.setattr(first, "lacks", lambda rounds, attempt, tasks: lacked.append(tasks))
    monkeypatch.setattr(second, "grace", 60.0)  # which waits for the mean
    made.side_by_side(work, range(2))
    assert lacked == [[1]]
