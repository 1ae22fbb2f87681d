"""Encoding and decoding speed of each method on one core, and its compression ratio.

    python benchmarks/compression.py [--elements 25000000]

AtomoSVD is measured on a matrix of 1000 × 1000: a decomposition of 25 million elements takes minutes. A copy of the
vector is measured for comparison.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["OMP_NUM_THREADS"] = "1"

import side_by_side

REPEATS = 5


def methods():
    from tfdist import compression as c

    return [
        c.Float16(),
        c.BFloat16(),
        c.Float8("e4m3"),
        c.Float8("e5m2"),
        c.Float16(stochastic=True),
        c.BFloat16(stochastic=True),
        c.Float8("e4m3", stochastic=True),
        c.Int8(),
        c.Int8(stochastic=True),
        c.Int4(),
        c.QSGD(),
        c.QSGD(levels=7),
        c.TernGrad(),
        c.OneBit(),
        c.SignSGD(),
        c.RandomK(0.01),
        c.TopK(0.01),
        c.Threshold(2.576e-3),
        c.DeepGradientCompression(0.01),
        c.Strom(tau=3.23e-3),
        c.Atomo(0.01),
        c.PowerSGD(4),
        c.AtomoSVD(3),
        c.ErrorFeedback(c.Int8()),
        c.ErrorFeedback(c.TopK(0.01)),
    ]


def measure(elements):
    import numpy as np

    from tfdist import compression as c

    def best(function):
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            result = function()
            times.append(time.perf_counter() - begin)
        return min(times), result

    every = (1e-3 * np.random.default_rng(0).standard_normal(elements)).astype(np.float32)
    figures = {}
    for method in methods():
        vector = every[:1_000_000] if isinstance(method, c.AtomoSVD) else every
        side = int(vector.size**0.5)
        state = c.State(shape=(side, vector.size // side) if vector.size % side == 0 else None)
        out = np.empty_like(vector)
        encoding, payload = best(lambda method=method, vector=vector, state=state: method.encode(vector, state))
        decoding, _ = best(lambda method=method, payload=payload, out=out: method.decode(payload, out))
        figures[str(method)] = {
            "encode GB/s": vector.nbytes / encoding / 1e9,
            "decode GB/s": vector.nbytes / decoding / 1e9,
            "both GB/s": vector.nbytes / (encoding + decoding) / 1e9,
            "ratio": vector.nbytes / payload.size,
            "unbiased": method.unbiased,
            "linear": method.linear,
            "route": method.route.value,
        }
    seconds, _ = best(lambda: np.copyto(out, vector))
    figures["a copy"] = {"both GB/s": vector.nbytes / seconds / 1e9}
    side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    options = parser.parse_args()
    figures = side_by_side.measure([__file__, "measure", str(options.elements)], 1, cores=True)
    columns = ["encode GB/s", "decode GB/s", "both GB/s", "ratio"]
    side_by_side.table(list(figures.items()), columns, f"{options.elements:,} float32 elements, one core")
    side_by_side.save(options.json, {"elements": options.elements, "methods": figures})


if __name__ == "__main__":
    import sys

    if sys.argv[1:2] == ["measure"]:
        measure(int(sys.argv[2]))
    else:
        main()
