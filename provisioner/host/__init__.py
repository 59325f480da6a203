"""One host's provisioning cycle: the RPCs to its server, the site's helper, the outcome."""
