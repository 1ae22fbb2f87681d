"""Figures of the documentation, which need matplotlib."""

from page_text import RESULTS

BASE = {"linewidth": 2.5, "color": "black", "linestyle": "-"}
"""The line style of the baseline in plots."""


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
