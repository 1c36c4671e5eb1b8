"""The console script `executor`. Not here: any command (cli)."""

from planner.basics.start import begin


def main() -> None:
    """Import the commands and run the one that is asked for."""
    begin("executor.cli")
