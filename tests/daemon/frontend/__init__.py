"""The HTTP face, tested over a real server with a fake submitter behind it."""
