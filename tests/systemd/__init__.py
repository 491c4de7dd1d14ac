"""The units and the installation, against a real systemd where one can be booted."""
