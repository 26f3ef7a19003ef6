"""How many images of a disk after a power loss open to exactly what was acknowledged.

    python benchmarks/power_loss.py                  2,000 images, and 300 of each mutant; some minutes
    python benchmarks/power_loss.py --images 10000
    python benchmarks/power_loss.py --smoke          a few seconds

JSON goes to stdout, one line to stderr. The images are those of `tests/store/power_trials.py`, which needs
Linux and a C compiler. A mutant does not sync its files, its folders, or its catalog at each commit; the
count is how many of its images the same checks find wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRIALS = Path(__file__).parent.parent / "tests" / "store" / "power_trials.py"
MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--mutants", type=int, default=300, help="images of each mutant")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    images, mutants = (30, 20) if args.smoke else (args.images, args.mutants)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        run = subprocess.run(
            [sys.executable, TRIALS, folder, str(images), str(mutants)],
            stdout=subprocess.PIPE,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    report = json.loads(run.stdout)
    done = sum(report["images"].values())
    report["caught"] = {mutant: len(found) for mutant, found in report["caught"].items()}
    report |= {"images_of_each_mutant": mutants, "seconds": round(time.monotonic() - start)}
    print(json.dumps(report, indent=2))
    caught = ", ".join(f"{mutant} {found}" for mutant, found in report["caught"].items())
    wrong = len(report["problems"])
    print(f"{done} images, {wrong} wrong; of {mutants} images wrong without: {caught}", file=sys.stderr)
    sys.exit(bool(wrong) or done < images)


if __name__ == "__main__":
    main()
