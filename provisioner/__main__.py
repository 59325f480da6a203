"""``python -m provisioner``."""

from provisioner.cli import main

main(prog_name="python -m provisioner")
