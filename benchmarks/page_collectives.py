"""Tables of collectives, of steps and epochs of `fit`, and of memory."""

import statistics

from page_text import median_and_spread, table


def write_all_reduce(figures):
    rates = figures["gb_per_s"]
    ours = rates["tfdist, in a tf.function"]
    sizes = list(ours)
    rows = [[name, *(f"{row[size]:.2f}" if size in row else "—" for size in sizes)] for name, row in rates.items()]
    ratios = [
        [name, *(f"{ours[size] / row[size]:.2f} ×" if size in row else "—" for size in sizes)]
        for name, row in rates.items()
        if row is not ours
    ]
    header = [f"{float(size):g} MiB" for size in sizes]
    return (
        table(["GB/s", *header], rows) + "\ntfdist in a `tf.function`, against each:\n\n" + table(["", *header], ratios)
    )


def write_bench(figures):
    rows = [
        [
            f"{row['nbytes'] / 2**20:.3g}",
            row["algorithm"],
            f"{1e3 * row['measured']:.3f}",
            "—" if row["predicted"] is None else f"{1e3 * row['predicted']:.3f}",
            f"{row['bound'] / row['measured']:.0%}",
        ]
        for row in figures["rows"]
    ]
    return table(["MiB", "algorithm", "measured, ms", "predicted, ms", "of the bound"], rows)


def write_small(figures):
    rows = [[name, *(f"{value:.2f}" for value in row.values())] for name, row in figures["milliseconds"].items()]
    return (
        table(["ms a step", "alone", "beside a busy Python thread"], rows)
        + f"\n64 KiB: **{figures['above']:.2f} ms** above an empty `py_function`. 200 tensors of 4 KiB: "
        f"**{figures['fused']:.2f} ×** the time of one of their size. Above an empty function: "
        + "; ".join(f"{name} **{above:.2f} ms**" for name, above in figures["gradients"].items())
        + f". A mean of 22 MiB: **{figures['averaged']:.2f} ×** the time of a sum.\n"
    )


def write_buckets(figures):
    sections = []
    for way, rows in figures.items():
        limits = list(next(iter(rows.values())))
        body = [[name, *(f"{value:.1f}" for value in row.values())] for name, row in rows.items()]
        sections.append(table([f"ms a step, {way}", *(f"{limit} MiB" for limit in limits)], body))
    return "\n".join(sections)


def write_fit(figures):
    rows = [[f"{single:.0f}", f"{many:.0f}", f"{many / single:.2f} ×"] for single, many in figures["pairs"]]
    return table(["one process, samples/s", "two", ""], rows) + f"\nMedian: **{figures['median']:.2f} ×**.\n"


def write_epochs(figures):
    names = [name for name in figures["plain Keras"][0] if name != "processes"]
    rows = [
        [name, *(f"{statistics.median(reading[name] for reading in rounds):.1f}" for rounds in figures.values())]
        for name in names
    ]
    return table(["ms", *figures], rows)


def write_steps(figures):
    rows = [[*name.split(": "), *median_and_spread(ms, ".2f")] for name, ms in figures["above plain Keras"].items()]
    return table(["strategy", "model", "ms above plain Keras", "from – to"], rows)


def write_memory(figures):
    mib = figures["mib"]
    return (
        f"Gradients of {figures['gradients_mib']:.0f} MiB: one process peaks at {mib['one']:.0f} MiB, each of two at "
        f"{mib['two']:.0f} MiB, **{figures['share']:.2f} × the gradients** more.\n"
    )


def write_network(figures):
    flat, levels = figures["hierarchy"]["ring"], figures["hierarchy"]["hierarchical"]
    behind = figures["line"]["behind"]
    growth = [
        [
            size,
            name,
            f"{row['seconds']:.3f}",
            f"{row['predicted']:.3f}",
            f"{row['bytes'] / 2**20:.2f}",
        ]
        for size, rows in figures["growth"].items()
        for name, row in rows.items()
    ]
    overlap = [
        [
            row["batch"],
            *(f"{1e3 * row[name]:.0f}" for name in ("step_alone", "step", "communicating")),
            f"{row['hidden']:.0%}",
        ]
        for row in figures["overlap"]
    ]
    return (
        f"Two hosts, a line of 1 Gbit/s: the ring uses **{figures['line']['share']:.1%}** of it.\n\n"
        f"A sum of 4 KiB takes {1e3 * behind['alone']:.1f} ms there, and {1e3 * behind['behind']:.1f} ms right behind "
        f"one of 64 MiB, which takes {1e3 * behind['large']:.0f} ms.\n\n"
        "Two hosts of two processes each, 32 MiB: `hierarchical` is "
        f"**{flat['seconds'] / levels['seconds']:.2f} ×** as fast as the flat ring; the model predicts "
        f"{flat['predicted'] / levels['predicted']:.2f} ×.\n\n"
        + table(["hosts at 200 Mbit/s, 4 MiB", "algorithm", "s", "model, s", "MiB sent"], growth)
        + "\n"
        + table(["batch", "a step alone, ms", "on two hosts", "communicating", "hidden"], overlap)
    )


WRITERS = {
    "all_reduce_2": write_all_reduce,
    "all_reduce_4": write_all_reduce,
    "bench": write_bench,
    "small": write_small,
    "buckets": write_buckets,
    "fit": write_fit,
    "epochs": write_epochs,
    "steps": write_steps,
    "memory": write_memory,
    "network": write_network,
}
