"""How a command ends: one sentence and exit code 2 for what cannot be done."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

from benchmark.provenance import BenchmarkError


def guarded(function: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Call a command; end the process as a user of a command line expects."""
    # SIGTERM is answered as Ctrl-C is, so that no child is left behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        function(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
    except OSError as error:  # a folder that is a file, a full disk
        print(f"Error: {error.filename or 'The benchmark'}: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
    except BenchmarkError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
