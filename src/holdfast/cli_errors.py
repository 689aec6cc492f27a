"""What the command line says when something goes wrong: one clear message, no traceback."""

import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

__all__ = ["clear_errors", "stop", "writing"]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Says which folder could not be written, why, and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        from holdfast.reproduction import explain

        raise ValueError(explain(error, folder)) from error


@contextmanager
def clear_errors(*, resumes: bool = False) -> Iterator[None]:
    """Turns wrong input into one clear message, and Ctrl-C or a kill into a clean end.

    Args:
        resumes: Whether the command goes on where it was when it is given again.
    """

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    previous, spelled = signal.signal(signal.SIGTERM, interrupt), warnings.formatwarning
    warnings.formatwarning = _plain  # where it was raised says nothing to who runs a command
    try:
        yield
    except (ValueError, OSError, FloatingPointError) as error:
        stop(str(error))
    except MemoryError as error:
        stop(f"there is not enough memory{f': {error}' if str(error) else ''}")
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch's word for it
            raise
        stop(f"there is not enough memory: {error}")
    except KeyboardInterrupt:
        after = "; finished runs are kept, the same command goes on" if resumes else ""
        typer.echo(f"stopped{after}", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, previous)
        warnings.formatwarning = spelled


def _plain(message: Warning | str, *_: object, **__: object) -> str:
    return f"warning: {message}\n"


def stop(message: str) -> NoReturn:
    """End with a message and the exit code of wrong use."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)
