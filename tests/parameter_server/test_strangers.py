"""Messages that have the form of one, with anything in their fields: a server goes on, and answers its own worker."""

import dataclasses
import random
import typing

import msgspec
import numpy as np
import pytest
import zmq

from tests.parameter_server.serving import attach, connected, create, pull, push, serving
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.protocol import messages, wire

MESSAGES = 3000
KINDS = typing.get_args(
    messages._OfModels
    | messages._OfEpochs
    | messages._OfTables
    | messages.CompareState
    | messages.OfferSegment
    | messages.ReadModel
)
NUMBERS = (0, 0, 1, 1, 2, -1, 7, 1 << 31, -(1 << 62), (1 << 63) - 1)
TEXTS = ("", "model", "model", "../x", "a/b", "rows-0", "values", "é" * 1000, "\0")


def anything(kind, generator):
    """A value of a type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return made(kind, generator)
    if dataclasses.is_dataclass(kind):
        return kind()
    if origin is typing.Literal:
        return generator.choice(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(anything(arguments[0], generator) for _ in range(generator.randrange(4)))
    if origin is tuple:
        return tuple(anything(argument, generator) for argument in arguments)
    if origin is dict:
        return {anything(arguments[0], generator): anything(arguments[1], generator) for _ in range(2)}
    if arguments:  # of a union
        return anything(generator.choice(arguments), generator)
    values = {
        int: NUMBERS,
        float: (0.0, 1.0, -1.0, float("nan"), float("inf"), 1e300),
        bool: (True, False),
        str: TEXTS,
        type(None): (None,),
        typing.Any: (
            None,
            3,
            "x",
            {"class_name": "SGD", "config": {}},
            {"class_name": "os.system", "config": {"x": 1}},
        ),
        bytes: (b"", b"x" * 100),
    }
    return generator.choice(values[kind])


def made(kind, generator):
    """A message, whose fields are anything of their types."""
    hints = typing.get_type_hints(kind)
    return kind(**{field: anything(hints[field], generator) for field in kind.__struct_fields__})


def array(generator):
    shape = tuple(generator.choice((0, 1, 2, 3, 15)) for _ in range(generator.randrange(4)))
    dtype = generator.choice(("float32", "float32", "int64", "uint8", "bool", "complex128", "bfloat16"))
    return np.zeros(shape, np.dtype(dtype))


@pytest.mark.parametrize("seed", range(2))
def test_a_server_outlives_messages_of_any_content(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = random.Random(seed)
    with serving(deals=DealerService()) as server, connected(server) as worker:
        attach(worker)
        create(worker)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"tcp://{server.address}")
            for _ in range(MESSAGES):
                message = made(generator.choice(KINDS), generator)
                frames = wire.Codec.encode(message, [array(generator) for _ in range(generator.randrange(4))])
                stranger.send_multipart(frames)
            attach(worker)  # once all of them have been heard, as a stranger may say that it is this worker
            stranger.setsockopt(zmq.LINGER, 0)
        attach(worker)
        push(worker)
        assert pull(worker) is not None
    assert not list(tmp_path.iterdir())
