"""A provisioner for Choria: finds unconfigured servers and runs every one through its site's provisioning flow."""

__version__ = "0.1.0"
