"""The command line: ``python -m pyg_ioaware run | doctor | demo``.

What a command needs is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pyg_ioaware.cli.errors import CommandError


def _parser() -> argparse.ArgumentParser:
    from pyg_ioaware import demo

    parser = argparse.ArgumentParser(
        prog="python -m pyg_ioaware",
        description="Makes PyTorch Geometric models train faster and in less memory.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser(
        "run",
        usage="%(prog)s [--strict] [--quiet] (script.py | -m module) [arguments ...]",
        help="run a script unchanged, patched",
        description="Patches PyG, runs a script or module as Python would, and prints what ran "
        "fused to stderr. Processes that the script starts by 'spawn' are not patched: call "
        "pyg_ioaware.patch() in them.",
    )
    run.add_argument("--strict", action="store_true", help="raise where stock would run")
    run.add_argument("--quiet", action="store_true", help="print nothing at the end")

    doctor = commands.add_parser("doctor", help="what is installed, what works, what is missing")
    doctor.add_argument(
        "--support-table", action="store_true", help="print the README's table of layers instead"
    )

    demo.add_arguments(
        commands.add_parser(
            "demo",
            help="train models stock and fused, side by side",
            description="Trains the same models from the same seed, stock and then fused: losses, "
            "time per epoch, peak memory, a picture. Data: scikit-learn's digits by default.",
        )
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    target: list[str] = []
    module = False
    if argv[:1] == ["run"]:
        from pyg_ioaware.cli import run

        own, module, target = run.split(argv[1:])
        argv = ["run", *own]
    args = _parser().parse_args(argv)
    try:
        if args.command == "run":
            return run.main(target, module, args.strict, not args.quiet)
        if args.command == "doctor":
            from pyg_ioaware.cli import doctor

            return doctor.main(args.support_table)
        from pyg_ioaware import demo

        return demo.main(args)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
