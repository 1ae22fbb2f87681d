"""GB/s of a parameter server's messages: 64 MiB pushed, pulled, and both in one exchange.

Over TCP on loopback, encrypted by CURVE and in the clear, and in shared memory.

Compared with bare pyzmq, which neither copies nor checks anything; a plain socket; and gRPC, where it is installed. No
model: servers drop what is pushed, and answer from memory. With several servers each holds an equal part, and all
workers push and pull at the same time. Every implementation is measured in every round.

A round starts processes twelve times, and moves 9 GB by each implementation. On a busy machine it takes minutes:

    python benchmarks/servers_transport.py
    python benchmarks/servers_transport.py --rounds 1 --repeats 3  # only shows that all of it runs
"""

import json
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import servers
import side_by_side

PUSH, PULL, BOTH = "push", "pull", "both"
KINDS = (PUSH, PULL, BOTH)
CASES = {"1 server, 1 worker": (1, 1), "2 servers, 2 workers": (2, 2)}


class Zmq:
    """A DEALER and a ROUTER; a message is its kind, and the array."""

    @staticmethod
    def serve(values):
        import zmq

        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, 0)
        print(f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}", flush=True)
        while True:
            peer, kind, *_ = router.recv_multipart(copy=False)
            router.send_multipart([peer.bytes, b"" if kind.bytes.decode() == PUSH else values.data], copy=False)

    def __init__(self, address):
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://{address}")

    def exchange(self, kind, array):
        """Bytes of the answer, where they have arrived."""
        self._socket.send_multipart([kind.encode(), b"" if kind == PULL else array.data], copy=False)
        return self._socket.recv(copy=False).buffer.nbytes


class Socket:
    """A TCP connection, with a thread each in the server; a message is its kind's number and its length, and bytes."""

    @staticmethod
    def serve(values):
        def answer(connection):
            into = memoryview(bytearray(values.nbytes))
            while (message := Socket._receive(connection, into)) is not None:
                Socket._send(connection, 0, b"" if message[0] == KINDS.index(PUSH) else values.data)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            print("127.0.0.1:{1}".format(*listener.getsockname()), flush=True)
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    def __init__(self, address):
        host, port = address.split(":")
        self._connection = socket.create_connection((host, int(port)))
        self._into = None

    def exchange(self, kind, array):
        if self._into is None:
            self._into = memoryview(bytearray(array.nbytes))
        self._send(self._connection, KINDS.index(kind), b"" if kind == PULL else array.data)
        return self._receive(self._connection, self._into)[1]

    @staticmethod
    def _send(connection, kind, data):
        view = memoryview(data).cast("B")
        connection.sendall(bytes([kind]) + view.nbytes.to_bytes(8, "little"))
        connection.sendall(view)

    @staticmethod
    def _receive(connection, into):
        """The message's kind and length; None at the connection's end."""
        header = connection.recv(9, socket.MSG_WAITALL)
        if len(header) < 9:
            return None
        length = int.from_bytes(header[1:], "little")
        filled = 0
        while filled < length:
            filled += connection.recv_into(into[filled:length])
        return header[0], length


class Grpc:
    """A unary call for each kind, on bytes that are made beforehand, without protocol buffers."""

    OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

    @staticmethod
    def serve(values):
        import grpc

        data = values.tobytes()
        answers = {PUSH: b"", PULL: data, BOTH: data}
        handlers = {
            kind: grpc.unary_unary_rpc_method_handler(lambda request, context, answer=answer: answer)
            for kind, answer in answers.items()
        }
        server = grpc.server(ThreadPoolExecutor(4), options=Grpc.OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark", handlers),))
        print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
        server.start()
        server.wait_for_termination()

    def __init__(self, address):
        import grpc

        channel = grpc.insecure_channel(address, options=self.OPTIONS)
        self._calls = {kind: channel.unary_unary(f"/benchmark/{kind}") for kind in KINDS}
        self._data = None

    def exchange(self, kind, array):
        if self._data is None:
            self._data = array.tobytes()
        return len(self._calls[kind](b"" if kind == PULL else self._data, wait_for_ready=True))


class Tfdist:
    """tfdist's `Connection` and `ParameterServer`, with a shard that only answers."""

    secret = b""

    @classmethod
    def keys(cls):
        from tfdist.parameter_server.protocol.curve import Keys

        return Keys.of_secret(cls.secret)

    @classmethod
    def serve(cls, values):
        from tfdist.parameter_server.protocol.messages import Pull, Values
        from tfdist.parameter_server.server.server import ParameterServer

        class Shards:
            tables = ()

            def __iter__(self):
                return iter(())

            def heard(self, peer, message, arrays, answer):
                asks = isinstance(message, Pull) or message.samples
                answer(Values(message.id, version=0, iterations=0, clock=0), [values] if asks else [])

        server = ParameterServer(Shards(), "127.0.0.1:0", cls.keys())
        print(server.address, flush=True)
        server.run()

    def __init__(self, address):
        from tfdist.parameter_server.worker.client import Connection

        self._connection = Connection(address, "ps", timeout=30, keys=self.keys())

    def exchange(self, kind, array):
        from tfdist.parameter_server.protocol.messages import Pull, Push

        worker = {"worker": 0, "incarnation": 0}
        if kind == PULL:
            _, values = self._connection.request(lambda id: Pull(id=id, **worker))
        else:
            numbers = {"sequence": 0, "clock": 0, "read": 0, "samples": float(kind == BOTH)}
            _, values = self._connection.request(lambda id: Push(id=id, **worker, **numbers), [array])
        return sum(value.nbytes for value in values)


class Encrypted(Tfdist):
    """The same with the job's secret: CURVE."""

    secret = b"of the job"


class Shared(Tfdist):
    """The same in shared memory, where values come with the answer to a push."""

    def __init__(self, address):
        super().__init__(address)
        self._sequence = 0
        self._shared = None

    def exchange(self, kind, array):
        from tfdist.parameter_server.protocol.messages import Push

        if self._shared is None:
            self._shared = self._connection.share(0, array.nbytes, 1)
            assert self._shared
        self._sequence += 1
        numbers = {"worker": 0, "incarnation": 0, "sequence": self._sequence, "clock": 0, "read": 0}
        arrays, samples = [] if kind == PULL else [array], float(kind != PUSH)
        _, values = self._connection.request(lambda id: Push(id=id, **numbers, samples=samples), arrays)
        return sum(value.nbytes for value in values)


IMPLEMENTATIONS = {
    "tfdist": Tfdist,
    "tfdist, encrypted": Encrypted,
    "tfdist, shared memory": Shared,
    "bare pyzmq": Zmq,
    "plain socket": Socket,
    "gRPC": Grpc,
}
NEEDS = {"gRPC": "grpc"}


def part(nbytes):
    """A server's part of the values, or of the gradients."""
    import numpy as np

    return np.ones(nbytes // 4, np.float32)


def work(name, addresses, nbytes, repeats):
    """Exchanges with all servers at once. Reports when the exchanges of each kind began and ended, in seconds."""
    array = part(nbytes)
    clients = [IMPLEMENTATIONS[name](address) for address in addresses]
    with ThreadPoolExecutor(len(clients)) as pool:

        def exchange(kind):
            expected = 0 if kind == PUSH else nbytes
            if len(clients) == 1:
                received = [clients[0].exchange(kind, array)]
            else:
                received = list(pool.map(lambda client: client.exchange(kind, array), clients))
            assert received == [expected] * len(clients), received

        for kind in KINDS:
            exchange(kind)
            print("ready", flush=True)
            sys.stdin.readline()
            begun = time.monotonic()
            for _ in range(repeats):
                exchange(kind)
            print(json.dumps([begun, time.monotonic()]), flush=True)


def gb_per_s(name, server_count, worker_count, nbytes, repeats):
    """By kind: bytes of all workers, each way, over the time from the first's begin to the last's end."""
    each = nbytes // server_count
    with servers.children([[__file__, "--serve", name, str(each)]] * server_count, deadline=300) as serving:
        addresses = [servers.line(popen) for popen in serving]
        command = [__file__, "--work", name, json.dumps(addresses), str(each), str(repeats)]
        with servers.children([command] * worker_count, deadline=300) as working:
            rates = {}
            for kind in KINDS:
                for popen in working:
                    servers.line(popen)
                for popen in working:
                    print(file=popen.stdin, flush=True)
                begun, ended = zip(*(json.loads(servers.line(popen)) for popen in working), strict=True)
                moved = each * server_count * worker_count * repeats * (2 if kind == BOTH else 1)
                rates[kind] = moved / (max(ended) - min(begun)) / 1e9
    return rates


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10, help="exchanges of each kind in a round")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    options = parser.parse_args()
    names = [name for name in options.implementations if side_by_side.installed(NEEDS.get(name, "zmq"))]
    figures = {case: {name: {kind: [] for kind in KINDS} for name in names} for case in CASES}
    for number in range(options.rounds):
        for case, (server_count, worker_count) in CASES.items():
            for name in names:
                print(f"round {number + 1} of {options.rounds}, {case}, {name} …", file=sys.stderr)
                rates = gb_per_s(name, server_count, worker_count, options.mib << 20, options.repeats)
                for kind, rate in rates.items():
                    figures[case][name][kind].append(rate)
    for case, rows in figures.items():
        medians = [
            (name, {kind: statistics.median(rates) for kind, rates in row.items()}) for name, row in rows.items()
        ]
        side_by_side.table(medians, KINDS, f"GB/s, {options.mib} MiB, {case}; both: the sum of both ways")
        for name in names if "tfdist" in names else ():
            if name != "tfdist":
                ratios = {
                    kind: [ours / other for ours, other in zip(rows["tfdist"][kind], rows[name][kind], strict=True)]
                    for kind in KINDS
                }
                spreads = [(kind, servers.spread(values)) for kind, values in ratios.items()]
                side_by_side.table(spreads, ["median", "from", "to"], f"tfdist : {name}, by rounds")
    side_by_side.save(options.json, {"mib": options.mib, "gb_per_s": figures})


if __name__ == "__main__":
    if "--serve" in sys.argv:
        IMPLEMENTATIONS[sys.argv[2]].serve(part(int(sys.argv[3])))
    elif "--work" in sys.argv:
        work(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
