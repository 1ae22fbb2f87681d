"""Where a server listens."""

import contextlib

import pytest
import zmq

from tfdist.errors import TfdistError
from tfdist.parameter_server.listening import bind


@contextlib.contextmanager
def router():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.setsockopt(zmq.LINGER, 0)
        yield made


def test_a_free_port_is_taken():
    with router() as first, router() as second:
        host, _, port = bind(first, "127.0.0.1:0").rpartition(":")
        assert host == "127.0.0.1"
        with pytest.raises(TfdistError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            bind(second, f"127.0.0.1:{port}")


def test_a_name_that_is_none_is_an_error():
    with router() as made, pytest.raises(TfdistError, match=r"the parameter server's own address a\.\.b:1 cannot be"):
        bind(made, "a..b:1")
