"""``penstock profile``: the time that a model's layers take on the devices at hand."""

from __future__ import annotations

from penstock.bench.profile.options import ProfileOptions
from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson

app = new_app()


@app.command()
@command
def profile(*, options: ProfileOptions, as_json: AsJson = False) -> None:
    from penstock.bench.profile.command import run_profile

    run_profile(options, as_json=as_json)
