"""Requests through instances, event by event, by the policies that the service itself runs."""
