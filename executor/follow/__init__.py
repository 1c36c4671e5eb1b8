"""Runs from elsewhere than their launcher: shown, followed, stopped."""
