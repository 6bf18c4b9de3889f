"""What the verbs of the command line share: their options, and failures as messages with exit codes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import click

from archlab.cli import completion
from archlab.cli.arguments import escaped, is_text
from archlab.search.utils.exits import leave

INVALID, REFUSED, TRY_AGAIN, INTERRUPTED = 2, 3, 75, 130
_TRAINING = ("calibrate", "challenge", "mcp", "plan", "run")  # what a mistake keeps from training


@contextmanager
def failures() -> Iterator[None]:
    """What a user can mend is a message and an exit code, never a traceback."""
    from archlab.search.executors.executor import ExecutorError, ResourcesError
    from archlab.search.store.lock import StudyLocked
    from archlab.search.store.store import StoreError, StoreRefused

    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    except StoreRefused as error:
        fail(str(error), INVALID)
    except (StudyLocked, ResourcesError) as error:
        fail(str(error), REFUSED)
    except (StoreError, ExecutorError) as error:
        fail(str(error), TRY_AGAIN)
    except BrokenPipeError:
        raise  # whoever read the output has seen enough, which click knows
    except OSError as error:
        fail(f"{error.filename or 'system'}: {error.strerror or error}", TRY_AGAIN)
    except ValueError as error:
        if type(error).__name__ not in ("SpecError", "DataError", "DamagedData", "DamagedDocuments"):
            raise
        fail(str(error) + _verdict(len(getattr(error, "problems", ()))), INVALID)


def _verdict(problems: int) -> str:
    """The last line about a wrong study."""
    counted = [f"{problems} problems"] if problems > 1 else []
    untouched = ["nothing was trained"] if click.get_current_context().command.name in _TRAINING else []
    return "\n\n" + "; ".join([*counted, *untouched]) if counted or untouched else ""


def fail(message: str, code: int) -> NoReturn:
    """Ends the process with a message on stderr and an exit code."""
    click.echo(escaped(message), err=True)
    leave(code)


def verb(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a verb, whose failures are told as `failures` does."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with failures():
            return function(*args, **kwargs)

    return guarded


def _load_plugins(_context: click.Context, _parameter: click.Parameter, files: tuple[str, ...]) -> None:
    """Executes the plug-ins that were named, before the verb itself begins."""
    if files:
        from archlab.arch_dsl.language import plugins

        with failures():
            for file in files:
                plugins.load(file)


PLUGIN = click.option(
    "--plugin",
    multiple=True,
    metavar="FILE",
    expose_value=False,
    callback=_load_plugins,
    help="Run a Python file that registers primitives of your own.",
)
STUDY = click.argument("study", type=click.Path(dir_okay=False), shell_complete=completion.files)
STUDY_OR_NAME = click.argument("study", shell_complete=completion.studies)
STORE = click.option(
    "--store", metavar="FOLDER", help="Where results are kept: without it ARCHLAB_STORE, or the nearest .archlab."
)
SET = click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Replace a value of the study.")
ALLOW = click.option("--allow-plugins", is_flag=True, help="Run the Python files that the study lists as plug-ins.")
ADDRESS = click.option("--address", metavar="HOST:PORT", help="A running Ray cluster; without it Ray is started here.")
INLINE = click.option("--inline", is_flag=True, help="Train in this process, one trial at a time, without Ray.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")


def in_bytes(_context: click.Context, parameter: click.Parameter, given: str | None) -> int | None:
    """What an option says in bytes: a number of them, or `20GB`, `500MB`, `1.5GiB`. Raises BadParameter."""
    from archlab.arch_dsl.language.source import Node
    from archlab.search.utils.quantities import Memory

    if given is None or given.isdigit():
        return None if given is None else int(given)
    problems: list[Any] = []
    found = Memory.parse_node(Node(given), "", problems)
    if problems:
        raise click.BadParameter(f"{problems[0].message}, or a number of bytes", param=parameter)
    return int(found.bytes)


def store_folder(given: str | None) -> Path:
    """The store folder, imported when it is asked for: a verb without a store starts faster."""
    from archlab.search.store.addresses import store_root

    found = store_root(given)
    if not is_text(str(found.absolute())):
        fail(f"{escaped(str(found.absolute()))} is not UTF-8 text: name a store folder that is, with --store", INVALID)
    return found


def study_name(given: str) -> str:
    """The name of a study, from its name or from its file (at the scale that the file itself is at)."""
    path = Path(given)
    if path.suffix not in (".yaml", ".yml"):
        return given
    from archlab.arch_dsl.language.include import read_whole
    from archlab.search.study.scales import at_scale

    value = at_scale(read_whole(path)).value
    node = value.get("study") if isinstance(value, dict) else None
    return str(node.value) if node else path.stem


def parsed(overrides: tuple[str, ...]) -> dict[str, Any]:
    """`train.tokens=20k` as a path and a value, the value read as YAML."""
    from archlab.arch_dsl.language.source import read_text

    found = {}
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"'{text}' is not PATH=VALUE", param_hint="--set")
        found[path] = read_text(value, f"--set {path}").plain()
    return found
