"""Checks for methods: the conformance suite and its pytest plug-in."""
