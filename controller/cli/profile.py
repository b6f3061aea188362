"""`testbed profile`: the speed, the memory and the link of a real board, as a profile that a scenario names."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the profile to this file.")
@click.option("--peer", help="Measure the link to this machine too, where `testbed profile --serve` runs.")
@click.option("--serve", is_flag=True, help="Be the peer of one measurement, on port 8720.")
@click.option("--program", is_flag=True, help="Print the program that measures, for a board without the testbed.")
def profile(out: Path | None, peer: str | None, serve: bool, program: bool) -> None:
    """Measure this machine: how fast it trains layers of several kinds and sizes, its memory, and the link to a peer.

    The file is a profile for `devices.<name>.profile`. A board needs Python and torch alone: what --program prints is
    run there, and takes --peer and --serve as well.

    \b
    Examples:
      testbed profile --out my-laptop.yaml
      testbed profile --program | ssh pi python3 - > my-pi.yaml
      testbed profile --program | ssh pi python3 - --peer 192.168.1.7 > my-pi.yaml
    """
    from controller.profiling import board
    from testbed.common.errors import HostError

    if program:
        click.echo(Path(board.__file__).read_text(), nl=False)
        return
    try:
        if serve:
            board.serve()
            return
        text = board.profile(peer)
        if out is None:
            click.echo(text, nl=False)
        else:
            out.write_text(text)
            click.echo(f"{out}: name it as devices.<name>.profile")
    except OSError as error:
        where = f"the link to {peer}" if peer else str(out or "port 8720")
        raise HostError(f"{where}: {error.strerror or error}") from None
    except ValueError as error:
        raise HostError(str(error)) from None
