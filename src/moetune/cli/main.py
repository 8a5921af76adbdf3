"""The entry point: verbs that load only when they run, and one place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

import moetune
from moetune.cli.errors import report_error, report_interrupt

if TYPE_CHECKING:
    from collections.abc import Sequence


class Verb(NamedTuple):
    """Where a verb's command lives and what it does in a line."""

    place: str
    summary: str


VERBS = {
    "doctor": Verb("moetune.cli.doctor:doctor", "Read a server's log: what is wrong, and what mends it."),
    "plan": Verb("moetune.cli.plan:plan", "What the server runs and looks for, and what tuning would gain."),
    "tune": Verb("moetune.cli.tune:tune", "Find a model's configs and write the server's files."),
    "lint": Verb("moetune.cli.lint:lint", "Config files: what cannot run, what a server will never read."),
    "borrow": Verb(
        "moetune.cli.borrow:borrow", "Make files of another GPU, server or Triton version safe here."
    ),
    "verify": Verb(
        "moetune.cli.verify:verify", "Files: does the server read them; are they right, and faster."
    ),
    "install": Verb("moetune.cli.install:install", "Put files where the server looks."),
    "uninstall": Verb("moetune.cli.uninstall:uninstall", "Bring back what was there before an install."),
    "status": Verb("moetune.cli.status:status", "What is installed where, and whether it still stands."),
    "experiment": Verb(
        "moetune.cli.experiment:experiment", "Try configs and flags on a real server: what helps stays."
    ),
    "routing": Verb("moetune.cli.routing:routing", "Inspect recorded expert choices; make synthetic ones."),
    "replay": Verb("moetune.cli.replay:replay", "Run the search strategy on a recorded landscape."),
    "explain": Verb("moetune.cli.explain:explain", "What the code of a finding means."),
}

_EPILOG = """\b
Examples:
  moetune plan Qwen/Qwen3-30B-A3B --server sglang --gpu "NVIDIA H200"
  moetune tune Qwen/Qwen3-30B-A3B --tp 2 --server vllm --gpu "NVIDIA L40S" --out configs

\b
Exit codes: 0 done, or something gained; 1 the answer is no for all that was asked;
2 something could not run; 130 interrupted. MOETUNE_DEBUG=1 shows tracebacks."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called: `--help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs, in the order of the table."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb."""
        del ctx
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.place.partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{verb.place} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


@click.group(
    cls=LazyGroup,
    epilog=_EPILOG,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(moetune.__version__, prog_name="moetune")
@click.pass_context
def cli(context: click.Context) -> None:
    """Tuned configs for the fused-MoE Triton kernels of SGLang and vLLM."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    arguments = list(arguments)
    try:
        code = cli.main(args=arguments, prog_name="moetune", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        return report_interrupt(arguments)
    except Exception as error:  # noqa: BLE001 - the last stop: a person gets a line, not a traceback
        return report_error(error, arguments)
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Entry point of the console script."""
    # numpy's matrices are small here: more threads gain nothing alone, cost twentyfold on a busy
    # machine, and add up in another order, which could change the last digit of a prediction.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets an escape, never an exception.
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:
        # Who reads has gone (`| head`), or the disk is full, which the sink has reported: the
        # interpreter must not complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


if __name__ == "__main__":
    main()
