"""Tables of other ways of training: rounds, stops, large batches, and devices."""

import json
import statistics

import local_sgd_best
from page_text import RESULTS, median_and_spread, table


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
    "gossip": write_gossip,
    "local_sgd_best": write_local_sgd_best,
    "goodput": write_goodput,
    "large_batch": write_large_batch,
    "device_scopes": write_device_scopes,
}
