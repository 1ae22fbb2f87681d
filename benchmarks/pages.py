"""Runs every benchmark and writes the tables and figures of the documentation; takes hours, mostly for compression.

python benchmarks/pages.py            # everything
python benchmarks/pages.py small fit  # only these; the stored figures of the others are kept
python benchmarks/pages.py none       # only writes the pages, from the stored figures
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import page_collectives
import page_compression
import page_figures
import page_servers
import page_training
from page_text import RESULTS

HERE = Path(__file__).parent
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
    "steps": [sys.executable, HERE / "steps.py"],
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

WRITERS = page_collectives.WRITERS | page_compression.WRITERS | page_servers.WRITERS | page_training.WRITERS


def main():
    wanted = [name for name in sys.argv[1:] if name != "none"] or ([] if sys.argv[1:] else list(COMMANDS))
    RESULTS.mkdir(exist_ok=True)
    for name in wanted:
        print(f"--- {name}", flush=True)
        subprocess.run([*map(str, COMMANDS[name]), "--json", str(RESULTS / f"{name}.json")], check=True)
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    write({name: WRITERS[name](figures) for name, figures in results.items()})
    page_figures.draw_all_reduce(results["all_reduce_2"])
    page_figures.draw_network(results["network"])
    page_figures.draw_compression_time(results["compression_time"])
    page_figures.draw_compression_growth(results["compression_growth"])


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


if __name__ == "__main__":
    main()
