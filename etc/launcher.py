#!/usr/bin/python3 -I
"""Starts the installed program: isolated (-I), so that no environment variable or folder changes what it imports."""

import sys

from provisioner.cli import main

sys.exit(main(prog_name="choria-provisioner"))
