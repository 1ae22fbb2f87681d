"""Tables of compressed gradients."""

import statistics

import compression_accuracy
import compression_time
from page_text import table


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


WRITERS = {
    "compression": write_compression,
    "compression_routes": write_compression_routes,
    "compression_accuracy": write_compression_accuracy,
    "compression_time": write_compression_time,
    "compression_growth": write_compression_growth,
}
