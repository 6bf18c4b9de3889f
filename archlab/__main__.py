"""`python -m archlab` is the command `archlab`."""

from archlab.cli.main import main

main(prog_name="archlab")
