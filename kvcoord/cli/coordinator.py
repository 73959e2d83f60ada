"""`kvcoord coordinator`: one coordinator process."""

import sys
from pathlib import Path

import click

from kvcoord.cli.configuration import load_config, nullable
from kvcoord.cli.options import ProcessOptions, config_option, process_options, set_option
from kvcoord.config import CoordinatorConfig
from kvcoord.observability.logs import configure
from kvcoord.runtime.coordinator import serve
from kvcoord.runtime.process import run


@click.command()
@config_option
@click.option(
    "--bind", multiple=True, metavar="ADDRESS", help="unix:///path, ipc:///path or tcp://host:port. May be repeated."
)
@click.option("--http", metavar="HOST:PORT", help="Loopback address for health, metrics and status, or none.")
@click.option("--insecure-tcp", is_flag=True, default=None, help="Accept tcp without keys. Not for production.")
@set_option
@process_options
def command(
    file: Path | None,
    bind: tuple[str, ...],
    http: str | None,
    insecure_tcp: bool | None,
    assignments: tuple[str, ...],
    process: ProcessOptions,
) -> None:
    """Serve groups of ranks: tally votes, decide, notice who is missing."""
    flags = {"bind": list(bind) or None, "http": nullable(http), "insecure_tcp": insecure_tcp}
    loaded = load_config(CoordinatorConfig, file, assignments, flags)
    config = loaded.config
    configure(config.log_level, config.log_format, "coordinator")
    code = run(
        lambda stop: serve(config, stop, loaded.sources),
        shutdown_timeout_s=config.timeouts.shutdown_timeout_s,
        ready_fd=process.ready_fd,
        exit_with_parent=process.exit_with_parent,
    )
    sys.exit(code)
