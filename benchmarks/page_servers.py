"""Tables of parameter servers."""

import statistics

import servers_accuracy
from page_text import median_and_spread, table


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


WRITERS = {
    "servers_small": write_servers_small,
    "servers_hogwild": write_servers_hogwild,
    "servers_delays": write_servers_delays,
    "servers_transport": write_servers_transport,
    "servers_embedding": write_servers_embedding,
    "servers_accuracy": write_servers_accuracy,
}
