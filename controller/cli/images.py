"""`testbed images`: build, show and remove the container images."""

from __future__ import annotations

import secrets

import click

from controller.cli.options import as_json
from controller.cli.printing import dump, say
from testbed.common import formats


@click.command()
@as_json
@click.option("--env", "as_env", is_flag=True, help="Print as variables for compose/, with a new random token.")
@click.option("--prune", is_flag=True, help="Remove the testbed's images that the present files do not need.")
@click.option("--remove", is_flag=True, help="Remove all of the testbed's images; build nothing.")
def images(as_json: bool, as_env: bool, prune: bool, remove: bool) -> None:
    """Build the images that the present files ask for, where they are missing, and list them."""
    from controller.lab.engine import connect, ensure_engine
    from controller.lab.images import ensure_images, remove_images

    if remove:
        for tag in remove_images(connect()):
            click.echo(f"removed {tag}")
        return
    client = ensure_engine(say)
    wanted = ensure_images(client, say)
    if prune:
        for tag in remove_images(client, keep=wanted):
            click.echo(f"removed {tag}", err=True)
    if as_env:
        click.echo(f"TESTBED_DEVICE_IMAGE={wanted.device}\nTESTBED_SHAPER_IMAGE={wanted.shaper}")
        click.echo(f"TESTBED_TOKEN={secrets.token_urlsafe(24)}")
        return
    found = {kind: client.images.get(tag) for kind, tag in vars(wanted).items()}
    rows = [
        {"image": kind, "tag": getattr(wanted, kind), "id": image.id, "bytes": image.attrs["Size"]}
        for kind, image in found.items()
    ]
    if as_json:
        dump(rows)
        return
    for row in rows:
        click.echo(f"{row['image'].replace('_', ' '):16}{row['tag']:36}{formats.size(row['bytes']):>10}")
