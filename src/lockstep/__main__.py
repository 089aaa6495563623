"""`lockstep` and `python -m lockstep`."""

import sys


def main() -> None:
    """Runs the command line; `--version` alone needs no library."""
    if sys.argv[1:] == ["--version"]:
        from lockstep import __version__

        sys.stdout.write(f"lockstep {__version__}\n")
        return
    from lockstep.base.errors import ForkedWorker
    from lockstep.cli import OWN_PROCESS, app

    try:
        app(obj=OWN_PROCESS)
    except ForkedWorker as worker:
        run = worker.run
    run()


if __name__ == "__main__":
    main()
