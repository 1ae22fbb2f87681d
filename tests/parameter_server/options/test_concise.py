from dataclasses import dataclass

from tfdist.parameter_server.options.concise import Concise, text_of


@dataclass(frozen=True, repr=False)
class Options(Concise):
    needed: int
    more: str | None = None


def test_repr_omits_default_values():
    assert repr(Options(1)) == "Options(needed=1)"
    assert repr(Options(1, "a")) == "Options(needed=1, more='a')"


def test_repr_of_plain_objects_has_no_address():
    assert text_of(object()) == "object"
    assert repr(Options(1, object())) == "Options(needed=1, more=object)"
