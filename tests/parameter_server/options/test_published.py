from dataclasses import dataclass

import pytest

from tfdist import compression as c
from tfdist.errors import MismatchError, TfdistError
from tfdist.parameter_server import (
    Asynchronous,
    BoundedStaleness,
    DelayCompensated,
    DropBeyond,
    ElasticAveraging,
    Exponential,
    Gradients,
    Hogwild,
    Inverse,
    LocalSteps,
    PerHost,
    Servers,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.options import published
from tfdist.parameter_server.options.arguments import Arguments


def options_of(*synchronization, **arguments):
    return published.describe(Arguments(*synchronization, **arguments))


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
    *({"synchronization": option} for option in (BoundedStaleness(2), SoftSync(3), Synchronous(backup_workers=1))),
    {"synchronization": BoundedStaleness(2, Inverse())},
    *(
        {"synchronization": Asynchronous(option)}
        for option in (Exponential(0.5), DropBeyond(4), DelayCompensated(2.0, 0.5))
    ),
    *({"pushes": option} for option in (LocalSteps(4), ElasticAveraging(3, 0.5), Hogwild(), Gradients(sparse="lazy"))),
    *({"pushes": Gradients(option, c.Int8(), 1)} for option in COMPRESSIONS),
    {"pushes": LocalSteps(4, c.TopK(0.5))},
    {"servers": PerHost(BoundedStaleness(2), roots=2)},
    *({"servers": option} for option in (Servers(copies=1), Servers(snapshots="folder", snapshot_seconds=2.0))),
    {"servers": PerHost(snapshots="folder")},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_encoded_options_decode_to_equal_options(given):
    decoded = published.decode(options_of(**given).encode())
    assert decoded == options_of(**given)
    assert decoded.own == ()
    made = decoded.arguments()
    for name, value in given.items():
        assert repr(getattr(made, name)) == repr(value)
        assert type(getattr(made, name)) is type(value)
    assert made.synchronization.late == given.get("synchronization", Asynchronous()).late


def test_different_options_raise_and_are_named():
    published.check_equal(
        options_of(servers=Servers(snapshots="a")), options_of(servers=Servers(snapshots="b")), "ps 0"
    )
    with pytest.raises(MismatchError, match=r"has synchronization=Asynchronous\(\) on this task, and sy.*\(steps=2\)"):
        published.check_equal(options_of(), options_of(BoundedStaleness(2)), "chief 0 (host:1)")
    others = [
        {"data": "shared"},
        {"synchronization": Asynchronous(Inverse())},
        *({"pushes": value} for value in (LocalSteps(2), Gradients(c.Int8()), Gradients(parameters=c.TopK(0.5)))),
        *({"servers": value} for value in (PerHost(), Servers(copies=1))),
    ]
    for given in others:
        with pytest.raises(MismatchError, match=f"{next(iter(given))}=.* on chief 0 .*same arguments on every task"):
            published.check_equal(options_of(), options_of(**given), "chief 0 (host:1)")


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
        ("synchronization", BoundedStaleness(2, Halved())),
        ("synchronization", Asynchronous(Plain())),
        ("synchronization", Asynchronous(Inverse2())),
        ("pushes", Gradients(c.skip_small(OwnMethod()))),
        ("pushes", LocalSteps(2, OwnMethod())),
    ],
)
def test_user_defined_classes_need_the_script(name, value):
    decoded = published.decode(options_of(**{name: value}).encode())
    assert decoded.own == (name,)
    with pytest.raises(TfdistError, match=f"{name} is .*of a class that is not tfdist's own.* Run the script on the"):
        decoded.made(name)


def test_user_defined_classes_are_compared():
    published.check_equal(options_of(Asynchronous(Plain())), options_of(Asynchronous(Plain())), "ps 0")
    with pytest.raises(MismatchError, match="Halved"):
        published.check_equal(options_of(Asynchronous(Halved(0.5))), options_of(Asynchronous(Halved(0.25))), "ps 0")


@pytest.mark.parametrize("text", ["", "{}", '{"synchronization": 1}', "[]"])
def test_invalid_descriptions_raise(text):
    with pytest.raises(TfdistError, match="invalid options"):
        published.decode(text)


def test_manipulated_descriptions_are_not_executed():
    text = options_of().encode().replace("Asynchronous()", "__import__('os').getpid()")
    with pytest.raises(TfdistError, match="is not tfdist's own"):
        published.decode(text).made("synchronization")
