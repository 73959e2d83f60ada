"""`kvcoord worker`: the worker process of one rank."""

import sys
from pathlib import Path

import click

from kvcoord.cli.configuration import load_config, nullable
from kvcoord.cli.options import ProcessOptions, config_option, process_options, set_option
from kvcoord.config import WorkerConfig
from kvcoord.observability.logs import configure
from kvcoord.runtime.process import run
from kvcoord.runtime.serving import serve


@click.command()
@config_option
@click.option("--rank", type=int, metavar="N", help="Which rank of the group this is.")
@click.option("--http", metavar="HOST:PORT", help="Loopback address for health, metrics and status, or none.")
@set_option
@process_options
def command(
    file: Path | None, rank: int | None, http: str | None, assignments: tuple[str, ...], process: ProcessOptions
) -> None:
    """Serve the engine of one rank: host memory, index, copies, votes."""
    loaded = load_config(WorkerConfig, file, assignments, {"rank": rank, "http": nullable(http)})
    config = loaded.config
    configure(config.log_level, config.log_format, f"worker-{config.rank}")
    code = run(
        lambda stop: serve(config, stop, loaded.sources),
        shutdown_timeout_s=config.timeouts.shutdown_timeout_s,
        ready_fd=process.ready_fd,
        exit_with_parent=process.exit_with_parent,
    )
    sys.exit(code)
