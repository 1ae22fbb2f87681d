from dataclasses import dataclass

import pytest

from tfdist import compression as c
from tfdist.compression.policy import as_policy
from tfdist.errors import MismatchError, TfdistError
from tfdist.parameter_server import (
    AsItIs,
    Asynchronous,
    BoundedStaleness,
    DelayCompensated,
    DropBeyond,
    ElasticAveraging,
    Exponential,
    Hogwild,
    Inverse,
    LocalSteps,
    PerHost,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.options import published
from tfdist.parameter_server.options.staleness import AsItIs as AnotherName


def of(
    synchronization=Asynchronous(),  # noqa: B008
    staleness_policy=AsItIs(),  # noqa: B008
    data="own",
    pushes=None,
    compression=None,
    pull_compression=None,
    sparse="exact",
    replicas=1,
    hierarchy=None,
    **snapshots,
):
    chosen = None if compression is None else as_policy(compression)
    of_pulls = None if pull_compression is None else as_policy(pull_compression)
    snapshots = {"snapshots": None, "snapshot_seconds": 60.0, **snapshots}
    return published.of(
        synchronization,
        staleness_policy,
        data,
        pushes,
        chosen,
        of_pulls,
        sparse,
        replicas,
        hierarchy=hierarchy,
        **snapshots,
    )


COMPRESSIONS = [
    c.Int8(),
    c.Float8(),
    c.TopK(0.01),
    c.ErrorFeedback(c.RandomK(0.5)),
    c.WithoutFeedback(c.Strom(density=0.01)),
    c.Schedule({0: None, 5: c.TopK(0.5), 7: c.PowerSGD(2)}, every=10),
    c.by_name({"a|b": None}, otherwise=c.skip_small(c.Int4(), elements=7)),
    c.by_size({0: None, 10: c.QSGD(levels=3)}),
]
GIVEN = [
    *({"synchronization": one} for one in (BoundedStaleness(2), SoftSync(3), Synchronous(backup_workers=1))),
    *({"staleness_policy": one} for one in (Inverse(), Exponential(0.5), DropBeyond(4), DelayCompensated(2.0, 0.5))),
    *({"pushes": one} for one in (LocalSteps(4), ElasticAveraging(3, 0.5), Hogwild())),
    *({"compression": one} for one in COMPRESSIONS),
    {"hierarchy": PerHost(BoundedStaleness(2), roots=2)},
    {"snapshots": "folder", "snapshot_seconds": 2.0},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_server_makes_of_them_what_the_worker_has(given):
    found = published.decode(of(**given).encode())
    assert found == of(**given)
    assert found.own == ()
    for name, value in given.items():
        if name == "compression":
            assert repr(found.made(name)) == repr(as_policy(value))
        elif "snapshot" in name:
            assert getattr(found, name) == value
        else:
            assert found.made(name) == value
    assert found.made("staleness_policy") == given.get("staleness_policy", AnotherName())


def test_options_that_differ_are_named():
    published.check_equal(of(snapshots="a"), of(snapshots="b"), "ps 0")
    with pytest.raises(MismatchError, match=r"has synchronization=Asynchronous\(\) on this task, and sy.*\(steps=2\)"):
        published.check_equal(of(), of(BoundedStaleness(2)), "chief 0 (host:1)")
    others = {"data": "shared", "pushes": LocalSteps(2), "compression": c.Int8(), "replicas": 2, "sparse": "lazy"}
    others |= {"pull_compression": c.TopK(0.5), "hierarchy": PerHost()}
    for name, value in others.items():
        with pytest.raises(MismatchError, match=f"{name}=.* on chief 0 .*same arguments on every task"):
            published.check_equal(of(), of(**{name: value}), "chief 0 (host:1)")


@dataclass(frozen=True)
class Halved:
    """A policy of a user's."""

    factor: float = 0.5

    def scale(self, staleness):
        return self.factor


class Plain:
    def scale(self, staleness):
        return 1.0


class Inverse2(Inverse):
    def __repr__(self):
        return "Inverse()"


class OwnMethod(c.Int8):
    pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("staleness_policy", Halved()),
        ("staleness_policy", Plain()),
        ("staleness_policy", Inverse2()),
        ("compression", c.skip_small(OwnMethod())),
    ],
)
def test_classes_of_a_users_need_the_script(name, value):
    found = published.decode(of(**{name: value}).encode())
    assert found.own == (name,)
    with pytest.raises(TfdistError, match=f"{name} is .*of a class that is not tfdist's own.* Run the script on the"):
        found.made(name)


def test_classes_of_a_users_are_compared_all_the_same():
    published.check_equal(of(staleness_policy=Plain()), of(staleness_policy=Plain()), "ps 0")
    with pytest.raises(MismatchError, match="Halved"):
        published.check_equal(of(staleness_policy=Halved(0.5)), of(staleness_policy=Halved(0.25)), "ps 0")


@pytest.mark.parametrize("text", ["", "{}", '{"synchronization": 1}', "[]"])
def test_what_is_no_description_is_an_error(text):
    with pytest.raises(TfdistError, match="invalid options"):
        published.decode(text)


def test_what_was_tampered_with_is_not_executed():
    text = of().encode().replace("Asynchronous()", "__import__('os').getpid()")
    with pytest.raises(TfdistError, match="is not tfdist's own"):
        published.decode(text).made("synchronization")
