"""Runs every benchmark and writes the tables and figures of the documentation; takes hours, mostly for compression.

python benchmarks/pages.py            # everything
python benchmarks/pages.py small fit  # only these; the stored figures of the others are kept
python benchmarks/pages.py none       # only writes the pages, from the stored figures
"""

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import compression_accuracy
import compression_time
import local_sgd_best
import servers_accuracy

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "benchmarks"
BASE = {"linewidth": 2.5, "color": "black", "linestyle": "-"}
"""The line style of the baseline in plots."""
MARKS = re.compile(r"<!-- figures: (\w+) -->\n.*?<!-- end of figures -->\n", re.DOTALL)
TFDIST = [sys.executable, "-m", "tfdist.cli"]

COMMANDS = {
    "all_reduce_2": [sys.executable, HERE / "all_reduce.py"],
    "all_reduce_4": [sys.executable, HERE / "all_reduce.py", "--processes", "4"],
    "bench": [*TFDIST, "bench", "-n", "2", "--no-store"],
    "small": [sys.executable, HERE / "small.py"],
    "buckets": [sys.executable, HERE / "buckets.py"],
    "fit": [sys.executable, HERE / "fit.py"],
    "epochs": [sys.executable, HERE / "epochs.py"],
    "memory": [sys.executable, HERE / "memory.py"],
    "network": [sys.executable, HERE / "network.py"],
    "compression": [sys.executable, HERE / "compression.py"],
    "compression_routes": [sys.executable, HERE / "compression_routes.py"],
    "compression_growth": [sys.executable, HERE / "compression_growth.py"],
    "compression_accuracy": [sys.executable, HERE / "compression_accuracy.py"],
    "compression_time": [sys.executable, HERE / "compression_time.py"],
    "local_sgd": [sys.executable, HERE / "local_sgd.py"],
    "local_sgd_best": [sys.executable, HERE / "local_sgd_best.py"],
    "gossip": [sys.executable, HERE / "gossip.py"],
    "goodput": [sys.executable, HERE / "goodput.py"],
    "large_batch": [sys.executable, HERE / "large_batch.py"],
    "servers_small": [sys.executable, HERE / "servers_small.py"],
    "servers_delays": [sys.executable, HERE / "servers_delays.py"],
    "servers_transport": [sys.executable, HERE / "servers_transport.py"],
    "servers_embedding": [sys.executable, HERE / "servers_embedding.py"],
    "servers_hogwild": [sys.executable, HERE / "servers_hogwild.py"],
    "servers_accuracy": [sys.executable, HERE / "servers_accuracy.py"],
    "device_scopes": [sys.executable, HERE / "device_scopes.py"],
}


def main():
    wanted = [name for name in sys.argv[1:] if name != "none"] or ([] if sys.argv[1:] else list(COMMANDS))
    RESULTS.mkdir(exist_ok=True)
    for name in wanted:
        print(f"--- {name}", flush=True)
        subprocess.run([*map(str, COMMANDS[name]), "--json", str(RESULTS / f"{name}.json")], check=True)
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    write({name: WRITERS[name](figures) for name, figures in results.items()})
    draw_all_reduce(results["all_reduce_2"])
    draw_network(results["network"])
    draw_compression_time(results["compression_time"])
    draw_compression_growth(results["compression_growth"])


def write(texts):
    """Writes figures between their marks in the pages, where they are read without being built, too."""
    left = set(texts)
    for page in RESULTS.parent.glob("*.md"):
        parts = MARKS.split(page.read_text())
        for place in range(1, len(parts), 2):
            left.discard(parts[place])
            parts[place] = f"<!-- figures: {parts[place]} -->\n\n{texts[parts[place]]}\n<!-- end of figures -->\n"
        page.write_text("".join(parts))
    assert not left, f"no page has figures of {left}"


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


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
        f"**{figures['fused']:.2f} ×** the time of one of their size.\n"
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


def write_compression(figures):
    columns = ["encode GB/s", "decode GB/s", "both GB/s", "ratio"]
    rows = [
        [f"`{name}`", *(f"{row[column]:.2f}" if column in row else "—" for column in columns)]
        for name, row in figures["methods"].items()
    ]
    return table(["", *columns], rows)


def write_compression_routes(figures):
    sizes = figures["processes"]
    ways = {"hops": "ring, coding at each hop", "exchange": "exchange", "gather": "gather"}

    def section(what, show):
        rows = [
            [f"`{method}`", way, *(show(sizes[size][method][key]) for size in sizes)]
            for method in next(iter(sizes.values()))
            for key, way in ways.items()
        ]
        return table([what, "way", *(f"{size} processes" for size in sizes)], rows)

    errors = section("error, %", lambda row: f"{100 * row['error']:.2f}")
    return errors + "\n" + section("ms", lambda row: f"{1e3 * row['seconds']:.0f}")


def write_compression_accuracy(figures):
    sections = []
    for model, methods in figures["models"].items():
        rows = []
        base = [
            100 * statistics.mean(run["accuracy"] for run in methods[name]) for name in ("none", "none, no momentum")
        ]
        for name, runs in methods.items():
            accuracies = [100 * run["accuracy"] for run in runs]
            plain = base[name in compression_accuracy.WITHOUT_MOMENTUM and not name.startswith("DGC")]
            rows.append(
                [
                    name,
                    f"{statistics.mean(accuracies):.2f}",
                    f"{statistics.mean(accuracies) - plain:+.2f}",
                    f"{min(accuracies):.2f} – {max(accuracies):.2f}",
                    f"{runs[0]['mib_sent']:.1f}",
                    f"{runs[0]['ratio']:.1f}" if runs[0]["ratio"] else "—",
                    f"{statistics.median(run['seconds'] for run in runs):.0f}",
                ]
            )
        header = [model, "accuracy, %, mean of seeds", "against none", "from – to", "MiB sent", "times smaller", "s"]
        sections.append(table(header, rows))
    return "\n".join(sections)


def write_compression_time(figures):
    targets = figures["targets"]
    rows = []
    for name, runs in figures["steps"].items():
        row = [name, len(runs), f"{1e3 * figures['line'][name]['seconds']:.0f}"]
        for target in targets:
            seconds = compression_time.seconds_to(figures, name, target)
            base = compression_time.seconds_to(figures, "none", target)
            steps = [compression_time.to_target(run, target) for run in runs]
            row.append(
                f"not in {max(run['readings'][-1][1] for run in runs)} steps"
                if seconds is None
                else f"{seconds:.0f} s, {base / seconds:.1f} × ({statistics.median(steps):.0f} steps)"
            )
        row.append(f"{1e3 * figures['shared memory'][name]['seconds']:.0f}")
        rows.append(row)
    header = ["", "seeds", "ms a step", *(f"to {target:.0%}" for target in targets), "ms a step in memory"]
    return table(header, rows)


def write_compression_growth(figures):
    hosts = figures["hosts"]

    def section(what, show):
        rows = [
            [name, *(show(methods[name], methods["none"]) for methods in hosts.values())]
            for name in next(iter(hosts.values()))
        ]
        return table([what, *(f"{size} hosts" for size in hosts)], rows)

    return "\n".join(
        [
            section("times faster than none", lambda row, none: f"{none['seconds'] / row['seconds']:.1f}"),
            section("times smaller than none", lambda row, none: f"{none['bytes'] / row['bytes']:.1f}"),
            section("ms", lambda row, none: f"{1e3 * row['seconds']:.0f}"),
            section("of these in memory", lambda row, none: f"{1e3 * row['in memory']:.0f}"),
        ]
    )


def write_epochs(figures):
    names = [name for name in figures["plain Keras"][0] if name != "processes"]
    rows = [
        [name, *(f"{statistics.median(reading[name] for reading in rounds):.1f}" for rounds in figures.values())]
        for name in names
    ]
    return table(["ms", *figures], rows)


def median_and_spread(values, form):
    """Cells of a table: the median, and from the lowest to the highest."""
    return [format(statistics.median(values), form), f"{min(values):{form}} – {max(values):{form}}"]


def write_servers_small(figures):
    rates = [[name, *median_and_spread(values, ".0f")] for name, values in figures["steps per second"].items()]
    ratios = [[name, *median_and_spread(values, ".2f")] for name, values in figures["ratios"].items()]
    counts = [[name, count["steps"], count["iterations"]] for name, count in figures["2 workers"].items()]
    return "\n".join(
        [
            table(["", "steps per second", "from – to"], rates),
            table(["", "times as fast", "from – to"], ratios),
            table(["2 workers", "steps", "counted by the optimizer"], counts),
        ]
    )


def write_servers_hogwild(figures):
    cases = list(figures)
    names = list(next(iter(figures.values())))
    cell = "{0[0]} ({0[1]})".format
    rows = [[name, *(cell(median_and_spread(figures[case][name], ".0f")) for case in cases)] for name in names]
    return table(["steps per second of all workers", *cases], rows)


def write_servers_delays(figures):
    rows = [
        [
            f"`{mode}`",
            *median_and_spread([run["share"] for run in runs], ".0%"),
            *median_and_spread(figures["pause"][mode], ".0%"),
        ]
        for mode, runs in figures["slow"].items()
    ]
    return table(["", "one slow worker", "from – to", "one pause", "from – to"], rows)


def write_servers_transport(figures):
    sections = []
    for case, implementations in figures["gb_per_s"].items():
        ours = implementations.get("tfdist")
        rows = []
        for name, kinds in implementations.items():
            row = [name]
            for kind, rates in kinds.items():
                row.append(f"{statistics.median(rates):.2f}")
                if ours and kinds is not ours:
                    middle, spread = median_and_spread(
                        [rate / other for rate, other in zip(ours[kind], rates, strict=True)], ".2f"
                    )
                    row[-1] += f" ({middle} ×, {spread})"
            rows.append(row)
        sections.append(table([f"GB/s, {figures['mib']} MiB, {case}", *next(iter(implementations.values()))], rows))
    return "\n".join(sections)


def write_servers_embedding(figures):
    rates = [
        [name, *median_and_spread(values, ".0f")] for name, values in figures["thousands of keys per second"].items()
    ]
    ratios = [[name, *median_and_spread(values, ".2f")] for name, values in figures["ratios"].items()]
    return "\n".join(
        [
            table(["", "thousands of keys per second", "from – to"], rates),
            table(["", "times as fast", "from – to"], ratios),
        ]
    )


def write_servers_accuracy(figures):
    target, sections = figures["target"], []
    for delay, of_delay in figures["delays"].items():
        rows = []
        for name, runs in of_delay.items():
            if runs:
                accuracies = [100 * run["readings"][-1][2] for run in runs]
                reached = [servers_accuracy.seconds_to(run, target) for run in runs]
                rows.append(
                    [
                        name,
                        *median_and_spread(accuracies, ".2f"),
                        f"{statistics.median(run['readings'][-1][0] for run in runs):.1f}",
                        "not by all" if None in reached else f"{statistics.median(reached):.1f}",
                    ]
                )
        header = [f"{float(delay):g} ms delay", "accuracy, %", "from – to", "s", f"s to {target:.0%}"]
        sections.append(table(header, rows))
    return "\n".join(sections)


def write_local_sgd(figures):
    parts = []
    for rate, rows in figures.items():
        base = statistics.median(run[-1][0] for run in rows["all-reduce"])
        lines = []
        for name, runs in rows.items():
            seconds, spread = median_and_spread([run[-1][0] for run in runs], ".1f")
            ratio = f"{base / statistics.median(run[-1][0] for run in runs):.1f}"
            steps = str(round(statistics.median(run[-1][1] for run in runs)))
            sent = f"{statistics.median(run[-1][2] for run in runs) / 1e6:.1f}"
            lines.append([name, seconds, spread, ratio, steps, sent])
        header = [f"{rate[:-4]} {rate[-4:-3].upper()}bit/s", "s", "from – to", "× as fast", "steps", "MB sent"]
        parts.append(table(header, lines))
    return "\n".join(parts)


def write_gossip(figures):
    base, rows = statistics.median(run[-1][0] for run in figures["all-reduce"]), []
    for name, runs in figures.items():
        seconds = [run[-1][0] for run in runs]
        rates = [run[-1][1] / run[-1][0] for run in runs]
        row = [f"{base / statistics.median(seconds):.1f}", f"{statistics.median(run[-1][1] for run in runs):.0f}"]
        rows.append([name, *median_and_spread(seconds, ".1f"), *row, f"{statistics.median(rates):.1f}"])
    return table(["", "s", "from – to", "× as fast", "steps", "steps/s"], rows)


def write_local_sgd_best(figures):
    lines = json.loads((RESULTS / "local_sgd.json").read_text())
    rows = []
    for name, runs in figures.items():
        bests = [local_sgd_best.best(run) for run in runs]
        accuracy, spread = median_and_spread([100 * best[1] for best in bests], ".2f")
        steps = statistics.median(best[0] for best in bests)
        row = [name, accuracy, spread, f"{steps:.0f}"]
        for of_rate in lines.values():
            measured = of_rate.get(name)
            seconds = measured and steps * statistics.median(run[-1][0] / run[-1][1] for run in measured)
            row.append(f"{seconds:.0f}" if seconds else "—")
        rows.append(row)
    rates = [f"s at {rate[:-4]} {rate[-4:-3].upper()}bit/s" for rate in lines]
    return table(["", "best accuracy, %", "from – to", "after steps", *rates], rows)


def write_goodput(figures):
    rows = []
    for name, cases in figures["found"].items():
        pairs = list(zip(cases["one is killed"], cases["nobody is killed"], strict=True))
        shares = median_and_spread(
            [disturbed["samples/s"] / undisturbed["samples/s"] for disturbed, undisturbed in pairs], ".0%"
        )
        row = [name, *shares]
        for case in ("one is killed", "nobody is killed"):
            row.append(f"{statistics.median(run['samples/s'] for run in cases[case]):.0f}")
            row.append(f"{100 * statistics.median(run['accuracy'] for run in cases[case]):.2f}")
        rows.append(row)
    header = [
        "",
        "goodput",
        "from – to",
        "samples/s, one killed",
        "accuracy, %",
        "samples/s, nobody killed",
        "accuracy, %",
    ]
    return table(header, rows)


def write_large_batch(figures):
    rows = []
    for name, runs in figures["runs"].items():
        accuracy = median_and_spread([100 * run["accuracy"] for run in runs], ".2f")
        loss = f"{statistics.median(run['loss'] for run in runs):.3f}"
        seconds = f"{statistics.median(run['seconds'] for run in runs):.0f}"
        rows.append([name, figures["rates"][name], *accuracy, loss, seconds])
    return table(["", "rate", "test accuracy, %", "from – to", "training loss", "s"], rows)


def write_device_scopes(figures):
    rates = figures["steps per second"]
    rows = [[name, *median_and_spread(values, ".1f")] for name, values in rates.items()]
    alone = next(iter(rates.values()))
    for name, values in list(rates.items())[1:]:
        ratios = [rate / other for rate, other in zip(values, alone, strict=True)]
        rows.append([f"{name} : {next(iter(rates))}", *median_and_spread(ratios, ".2f")])
    stages = [
        [str(number), *median_and_spread(ratios, ".2f")]
        for number, ratios in enumerate(zip(*figures["predicted : measured"], strict=True))
    ]
    return "\n".join(
        [
            table(["two towers", "steps per second", "from – to"], rows),
            table(["stage", "seconds predicted : measured", "from – to"], stages),
        ]
    )


WRITERS = {
    "local_sgd": write_local_sgd,
    "local_sgd_best": write_local_sgd_best,
    "gossip": write_gossip,
    "goodput": write_goodput,
    "large_batch": write_large_batch,
    "epochs": write_epochs,
    "all_reduce_2": write_all_reduce,
    "all_reduce_4": write_all_reduce,
    "bench": write_bench,
    "small": write_small,
    "buckets": write_buckets,
    "fit": write_fit,
    "memory": write_memory,
    "network": write_network,
    "compression": write_compression,
    "compression_routes": write_compression_routes,
    "compression_growth": write_compression_growth,
    "compression_accuracy": write_compression_accuracy,
    "compression_time": write_compression_time,
    "servers_small": write_servers_small,
    "servers_delays": write_servers_delays,
    "servers_transport": write_servers_transport,
    "servers_embedding": write_servers_embedding,
    "servers_hogwild": write_servers_hogwild,
    "servers_accuracy": write_servers_accuracy,
    "device_scopes": write_device_scopes,
}


def axes_of(**settings):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tfdist"  # the same figures give the same file
    from cycler import cycler
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    axes.set(**settings)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_prop_cycle(cycler(linestyle=["-", "--"]) * cycler(color=pyplot.get_cmap("tab10").colors))
    return figure, axes


def save(figure, name):
    """Saves a figure with the legend beside the lines."""
    figure.axes[0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")


def draw_all_reduce(figures):
    figure, axes = axes_of(xscale="log", yscale="log", xlabel="MiB", ylabel="GB/s")
    for name, row in figures["gb_per_s"].items():
        if len(row) > 1:
            style = BASE if name == "tfdist, in a tf.function" else {}
            axes.plot([float(size) for size in row], list(row.values()), marker="o", label=name, **style)
    save(figure, "all_reduce")


def draw_network(figures):
    figure, axes = axes_of(xlabel="hosts at 200 Mbit/s", ylabel="seconds for 4 MiB (dashed: the model)")
    sizes = list(figures["growth"])
    for place, name in enumerate(figures["growth"][sizes[0]]):
        rows = [figures["growth"][size][name] for size in sizes]
        hosts = [int(size) for size in sizes]
        axes.plot(hosts, [row["seconds"] for row in rows], "o-", color=f"C{place}", label=name)
        axes.plot(hosts, [row["predicted"] for row in rows], "--", color=f"C{place}")
    save(figure, "growth")


def draw_compression_time(figures):
    figure, axes = axes_of(xscale="log", xlabel="seconds of training at 100 Mbit/s", ylabel="test accuracy")
    for name, runs in figures["steps"].items():
        seconds = figures["line"][name]["seconds"]
        _, steps, accuracies = zip(*runs[0]["readings"], strict=True)
        axes.plot([seconds * made for made in steps], accuracies, label=name, **(BASE if name == "none" else {}))
    save(figure, "compression_time")


def draw_compression_growth(figures):
    figure, axes = axes_of(
        xscale="log", yscale="log", xlabel="hosts at 100 Mbit/s", ylabel="times faster than no compression"
    )
    sizes = list(figures["hosts"])
    for name in figures["hosts"][sizes[0]]:
        ratios = [rows["none"]["seconds"] / rows[name]["seconds"] for rows in figures["hosts"].values()]
        hosts = [int(size) for size in sizes]
        axes.plot(hosts, ratios, marker="o", label=name, **(BASE if name == "none" else {}))
    axes.minorticks_off()
    axes.set_xticks([int(size) for size in sizes], sizes)
    save(figure, "compression_growth")


if __name__ == "__main__":
    main()
