"""A server that is not the job's."""

import contextlib
import socket
import threading

from tests.cluster.serving import DEADLINE, control
from tfdist.cluster import messages
from tfdist.cluster.messages import Challenge


class Impostor:
    """Answers at an address in place of the job's server: each connection is handed to ``answer``."""

    def __init__(self, answer):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                self._answer(connection, connection.makefile("rb"))

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE)


@contextlib.contextmanager
def contact(answer, **timeouts):
    """A task's connection to an impostor."""
    server = Impostor(answer)
    with contextlib.closing(server), contextlib.closing(control(server.address, 0, **timeouts)) as client:
        yield client


def says(*messages):
    def answer(connection, lines):
        connection.sendall(messages[0])
        for message in messages[1:]:
            lines.readline()
            connection.sendall(message)
        lines.readline()

    return answer


def challenge(protocol=messages.PROTOCOL):
    return messages.encode(Challenge(protocol, "n"))
