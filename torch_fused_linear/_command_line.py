"""What the command lines of `gain` and the benchmarks share."""

import argparse
from typing import NoReturn

EXIT_BAD_USAGE = 2


class OneLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_USAGE, f"{self.prog}: error: {message}\n")
